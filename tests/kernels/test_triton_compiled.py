"""The gate that compiles kernels for GPUs that are not here. It compiles in a process of its own: in this one they are interpreted."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.kernels.baseline import (
    REGISTERS_MORE_MAX,
    SHARED_BYTES_MAX,
    Table,
    path_of,
    problems,
    read_baseline,
    write_baseline,
)
from bench.kernels.resources import Resources, amd_resources, nvidia_resources

pytestmark = pytest.mark.patient

NAME = "sm_90 | a kernel | chunk_kernel"
FINE = Resources(registers=100, stack_bytes=0, shared_bytes=65_536, matrix={"HGMMA": 8}, wide_loads=4)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Compiled once, also where several processes share the tests."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return compile_everything()
    shared = tmp_path_factory.getbasetemp().parent
    with (shared / "compiled.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = shared / "compiled.json"
        if not path.exists():
            path.write_text(json.dumps(compile_everything()))
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def compile_everything() -> dict[str, Any]:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.compiled_gate"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_pinned_triton_has_a_baseline() -> None:
    """The comparison below skips where there is none: never for the version that is developed against."""
    pins = dict(line.split("==") for line in (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines() if "==" in line)
    assert path_of(pins["triton"]).exists()


def test_every_kernel_compiles_as_the_baseline_says(compiled: dict[str, Any]) -> None:
    """No stack, no more registers, the same matrix instructions, wide loads; wide matrix instructions where they are expected."""
    if not path_of(compiled["version"]).exists():
        pytest.skip(f"no baseline for triton {compiled['version']} (python -m bench.kernels.aot --write makes one)")
    assert compiled["problems"] == []
    for architecture in ("sm_80", "sm_90", "sm_100", "gfx942"):
        kernels = {name.split(" | ")[2] for name in compiled["table"] if name.startswith(architecture)}
        assert {"split_kernel", "reduce_kernel", "chunk_kernel", "matmul_kernel", "rope_kernel"} <= kernels
    assert len(compiled["table"]) >= 30


def test_a_kernel_that_spills_fails(compiled: dict[str, Any]) -> None:
    toys = compiled["toys"]
    assert toys["sm_90 | right | scale_kernel"]["stack_bytes"] == 0
    assert toys["sm_90 | spills | spilling_kernel"]["stack_bytes"] > 0
    assert [line[:14] for line in compiled["toy_problems"] if line.endswith("it spills")] == ["sm_90 | spills"]


def test_a_product_without_wide_instructions_fails(compiled: dict[str, Any]) -> None:
    assert "HGMMA" in compiled["toys"]["sm_90 | wide | product_kernel"]["matrix"]
    narrow = [line for line in compiled["toy_problems"] if "narrow" in line]
    assert narrow == ["sm_90 | narrow | product_kernel: no HGMMA or QGMMA, but HMMA"]
    assert not any("right" in line or "wide |" in line for line in compiled["toy_problems"])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, ""),
        ({"registers": 100 + REGISTERS_MORE_MAX}, ""),
        ({"registers": 101 + REGISTERS_MORE_MAX}, "109 registers, the baseline has 100"),
        ({"registers": 60}, ""),
        ({"stack_bytes": 8}, "8 bytes of stack: it spills"),
        ({"shared_bytes": SHARED_BYTES_MAX["sm_90"] + 1}, "232449 bytes shared, sm_90 has 232448"),
        ({"matrix": {"HMMA": 8}}, "no HGMMA or QGMMA, but HMMA"),
        ({"matrix": {}}, "no HGMMA or QGMMA, but no matrix instruction"),
        ({"matrix": {"HGMMA": 99}}, ""),
        ({"wide_loads": 0}, "no 16-byte loads, the baseline has 4"),
    ],
)
def test_what_is_worse_than_the_baseline_is_named(change: dict[str, Any], complaint: str) -> None:
    lines = problems({NAME: replace(FINE, **change)}, {NAME: FINE}, frozenset({NAME}))
    assert (lines[:1] == [f"{NAME}: {complaint}"]) if complaint else (lines == [])


def test_what_the_baseline_does_not_know_is_a_problem() -> None:
    assert problems({NAME: FINE}, {}) == [f"{NAME}: not in the baseline (write it anew)"]


def test_a_baseline_is_read_as_it_was_written(tmp_path: Path) -> None:
    table: Table = {NAME: FINE, "gfx942 | another | x": replace(FINE, matrix={}, wide_loads=0)}
    write_baseline(tmp_path / "deeper" / "triton-0.json", table)
    assert read_baseline(tmp_path / "deeper" / "triton-0.json") == table


def test_resources_of_nvidia_code() -> None:
    usage = " Function chunk_kernel:\n  REG:178 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:640 TEXTURE:0"
    listing = "HGMMA.64x64x16.F32 R24, …\n LDGSTS.E.BYPASS.LTC128B.128 [R1], …\n LDG.E.128 R4, …\n LDG.E R4, …\n HGMMA.64x64x16.F32 R24"
    assert nvidia_resources(usage, listing, 512) == Resources(178, 16, 512, {"HGMMA": 2}, 2)
    with pytest.raises(ValueError, match="says nothing of registers"):
        nvidia_resources("", listing, 0)


def test_resources_of_amd_code() -> None:
    listing = (
        "v_mfma_f32_16x16x16_bf16 a[0:3]\nglobal_load_dwordx4 v[0:3]\nbuffer_load_dwordx4 v[0:3]\nglobal_load_dword v0\n"
        "  .private_segment_fixed_size: 0\n  .vgpr_count:     96\n  .vgpr_spill_count: 0\n"
    )
    assert amd_resources(listing, 8192) == Resources(96, 0, 8192, {"v_mfma_f32_16x16x16_bf16": 1}, 2)
    with pytest.raises(ValueError, match="says nothing of vgpr_count"):
        amd_resources("", 0)
