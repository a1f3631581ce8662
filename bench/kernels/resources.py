"""What a compiled kernel takes of a machine, read from the machine code that Triton made."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOOL_TIMEOUT_S = 60.0
# The instructions that multiply matrices, by family; UTCHMMA and UTCQMMA are Blackwell's, of tensor memory.
_NVIDIA_MATRIX = ("HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA", "HMMA", "QMMA", "IMMA", "DMMA")
_NVIDIA_WIDE = re.compile(r"\b(?:LDG\.E\.(?:\S+\.)?128|LDGSTS\.E\.(?:\S+\.)?128|UTMALDG|UBLKCP)\b|\bLDGSTS\.E\S*\.128\b")
_AMD_WIDE = re.compile(r"\b(?:global_load_dwordx4|buffer_load_dwordx4|flat_load_dwordx4)\b")


@dataclass(frozen=True, slots=True)
class Resources:
    """Per thread: registers, stack. Per program: shared. In the code: how many of each matrix instruction, how many 16-byte loads."""

    registers: int
    stack_bytes: int  # spilled, or indexed dynamically: either is slow
    shared_bytes: int
    matrix: dict[str, int]
    wide_loads: int


def read_resources(compiled: Any) -> Resources:
    """Of what Triton compiled, for either vendor."""
    shared = int(compiled.metadata.shared)
    if "cubin" in compiled.asm:
        usage, listing = _disassemble(compiled.asm["cubin"])
        return nvidia_resources(usage, listing, shared)
    return amd_resources(compiled.asm["amdgcn"], shared)


def nvidia_resources(usage: str, listing: str, shared_bytes: int) -> Resources:
    """`usage` as of cuobjdump --dump-resource-usage, `listing` as of nvdisasm."""
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    if "REG" not in numbers:
        raise ValueError(f"cuobjdump says nothing of registers: {usage.strip()[:200]!r}")
    matrix = {name: count for name in _NVIDIA_MATRIX if (count := len(re.findall(rf"\b{name}\b", listing)))}
    wide = len(_NVIDIA_WIDE.findall(listing))
    return Resources(numbers["REG"], numbers.get("STACK", 0) + numbers.get("LOCAL", 0), shared_bytes, matrix, wide)


def amd_resources(listing: str, shared_bytes: int) -> Resources:
    """`listing` is the amdgcn assembly. Vector registers; accumulation registers are a part of them on gfx942."""

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:?\s+(\d+)", listing)
        if found is None:
            raise ValueError(f"the assembly says nothing of {name}")
        return int(found[1])

    names = re.findall(r"\b(v_s?mfma_\w+)", listing)
    matrix = {name: names.count(name) for name in dict.fromkeys(names)}
    return Resources(number("vgpr_count"), number("private_segment_fixed_size"), shared_bytes, matrix, len(_AMD_WIDE.findall(listing)))


def _disassemble(cubin: bytes) -> tuple[str, str]:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _run(tools / "cuobjdump", "--dump-resource-usage", file.name), _run(tools / "nvdisasm", "-c", file.name)


def _run(tool: Path, *args: str) -> str:
    done = subprocess.run([str(tool), *args], capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool.name} failed: {done.stderr.strip()[:200]}")
    return done.stdout
