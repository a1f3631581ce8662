"""What a compiled kernel takes of a machine, read from the machine code that Triton made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.kernels.disassembly import listings, resource_usage

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


def read_resources(compiled: Sequence[Any], architecture: str) -> list[Resources]:
    """Of each kernel that Triton compiled for `architecture`, of either vendor."""
    shared = [int(each.metadata.shared) for each in compiled]
    if not architecture.startswith("sm_"):
        return [amd_resources(each.asm["amdgcn"], size) for each, size in zip(compiled, shared, strict=True)]
    cubins = [each.asm["cubin"] for each in compiled]
    listed = zip(cubins, listings(cubins, architecture), shared, strict=True)
    return [nvidia_resources(resource_usage(cubin), listing, size) for cubin, listing, size in listed]


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
