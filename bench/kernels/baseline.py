"""What compiled kernels took of a machine when it was written down, and whether what they take now is acceptable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from bench.kernels.resources import Resources

REGISTERS_MORE_MAX = 8
DIRECTORY = Path(__file__).parent / "baselines"
# Of one program: what an architecture gives it at most.
SHARED_BYTES_MAX = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
# Matrix instructions of which an architecture has a wide form, and without which half of its speed is lost.
WIDE_MATRIX = {"sm_90": ("HGMMA", "QGMMA"), "sm_100": ("UTCHMMA", "UTCQMMA"), "gfx942": ("v_mfma",)}

Table = dict[str, Resources]  # by "architecture | subject | kernel"


def path_of(triton_version: str) -> Path:
    return DIRECTORY / f"triton-{triton_version}.json"


def read_baseline(path: Path) -> Table:
    return {name: Resources(**values) for name, values in json.loads(path.read_text()).items()}


def write_baseline(path: Path, table: Table) -> None:
    path.parent.mkdir(exist_ok=True)
    lines = (f"{json.dumps(name, ensure_ascii=False)}: {json.dumps(asdict(table[name]), sort_keys=True)}" for name in sorted(table))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def problems(found: Table, baseline: Mapping[str, Resources], expects_wide: frozenset[str] = frozenset()) -> list[str]:
    """One line for each thing that is wrong, in order of names; `expects_wide` names those that must use wide matrix instructions."""
    lines = []
    for name in sorted(found):
        lines += [f"{name}: {complaint}" for complaint in _complaints(name, found[name], baseline.get(name), name in expects_wide)]
    return lines


def _complaints(name: str, now: Resources, before: Resources | None, wide: bool) -> list[str]:
    architecture = name.partition(" | ")[0]
    lines = []
    if now.stack_bytes:
        lines.append(f"{now.stack_bytes} bytes of stack: it spills")
    if now.shared_bytes > SHARED_BYTES_MAX[architecture]:
        lines.append(f"{now.shared_bytes} bytes shared, {architecture} has {SHARED_BYTES_MAX[architecture]}")
    expected = WIDE_MATRIX.get(architecture, ())
    if wide and expected and not any(each.startswith(expected) for each in now.matrix):
        lines.append(f"no {' or '.join(expected)}, but {', '.join(now.matrix) or 'no matrix instruction'}")
    if before is None:
        return [*lines, "not in the baseline (write it anew)"]
    if now.registers > before.registers + REGISTERS_MORE_MAX:
        lines.append(f"{now.registers} registers, the baseline has {before.registers}")
    if set(now.matrix) != set(before.matrix):
        lines.append(f"matrix instructions {sorted(now.matrix)}, the baseline has {sorted(before.matrix)}")
    if before.wide_loads and not now.wide_loads:
        lines.append(f"no 16-byte loads, the baseline has {before.wide_loads}")
    return lines
