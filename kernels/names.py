"""What the kernels are called, and which of them a kind of device has. No torch: also for who only asks what could be."""

from __future__ import annotations

import os

KERNELS_VARIABLE = "RANTANG_KERNELS"
REFERENCE, TRITON = "reference", "triton"
CPU_STEP = "cpu"  # not operators: a whole step in C++ (kernels/cpu)
KNOWN = (CPU_STEP, REFERENCE, TRITON)


def wanted_kernels() -> str:
    """What the environment's RANTANG_KERNELS names; '' where it leaves the choice to us."""
    return os.environ.get(KERNELS_VARIABLE, "")


def operators_of(device: str, wanted: str) -> str:
    """Which operators serve a kind of device ('cpu', 'cuda'): an accelerator has Triton's, torch's only where that was asked for."""
    return TRITON if wanted == TRITON or (not wanted and device != "cpu") else REFERENCE


def misnamed(device: str, wanted: str) -> str:
    """Why the kernels that are wanted cannot be, in one line; '' where they can."""
    if wanted == CPU_STEP and device != "cpu":
        return f"{KERNELS_VARIABLE}={wanted} is the C++ step of a CPU; on {device} there are {TRITON} and {REFERENCE}"
    if wanted and wanted not in KNOWN:
        return f"{KERNELS_VARIABLE}={wanted}: unknown kernels (known: {', '.join(KNOWN)})"
    return ""
