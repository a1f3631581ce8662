"""Which tile a kernel works in: explicit tables by architecture, dtype and a size of the model. Nothing is tuned at run time
and nothing depends on the batch, so that a row alone is computed as it is in a batch, and a CUDA graph always finds its kernel.

A kernel's file holds its table beside the kernel:

    TILES = TileTable("silu_mul", (TileRow(EVERYWHERE, (torch.float32, *HALVES), Tile(n=1024, warps=4)),))
    tile = TILES.tile(architecture_of(gate_up.device), gate_up.dtype)
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kernels.errors import KernelError

# What Triton 3.9 does unless told, and says so at every compilation; later versions fuse no multiplications with additions.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

NVIDIA = ("sm_80", "sm_90", "sm_100")
EVERYWHERE = (*NVIDIA, "gfx942")
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)
INTERPRETED_AS = "sm_90"  # whose tiles the interpreter computes with, unless `pretend` says otherwise
REFERENCE_HINT = "RANTANG_KERNELS=reference computes with torch instead"


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program works on at a time. 0: the kernel has no such side."""

    m: int = 0  # rows: tokens, or tokens · the query heads of a KV head
    n: int = 0  # columns, or keys
    k: int = 0  # of the summed dimension
    split: int = 0  # keys of one split of split-KV: a size, never a count
    warps: int = 4
    stages: int = 1


@dataclass(frozen=True, slots=True)
class TileRow:
    """`tile` serves these architectures and dtypes, for sizes of the model (head dim, hidden, …: what the kernel says) up to `size_max`."""

    architectures: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    tile: Tile
    size_max: int | None = None  # None: any


@dataclass(frozen=True, slots=True)
class TileTable:
    """The first row that fits counts."""

    kernel: str
    rows: tuple[TileRow, ...]

    def tile(self, architecture: str, dtype: torch.dtype, size: int = 0) -> Tile:
        """Raises KernelError, with what would work, where no row fits."""
        if self.kernel in _forced:
            return _forced[self.kernel]
        for row in self.rows:
            if architecture in row.architectures and dtype in row.dtypes and (row.size_max is None or size <= row.size_max):
                return row.tile
        raise KernelError(self._refusal(architecture, dtype, size))

    def _refusal(self, architecture: str, dtype: torch.dtype, size: int) -> str:
        here = [row for row in self.rows if architecture in row.architectures]
        if not here:
            return f"{self.kernel} has no tile for {architecture} (it has for {', '.join(self.architectures)}); {REFERENCE_HINT}"
        fitting = [row for row in here if dtype in row.dtypes]
        if not fitting:
            known = dict.fromkeys(name_of(each) for row in here for each in row.dtypes)
            return f"{self.kernel} does not compute {name_of(dtype)} on {architecture} (it does {', '.join(known)}); {REFERENCE_HINT}"
        largest = max(row.size_max or 0 for row in fitting)
        return f"{self.kernel} computes sizes up to {largest} in {name_of(dtype)} on {architecture}, not {size}; {REFERENCE_HINT}"

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for row in self.rows for name in row.architectures))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on tensors of the CPU. Set before triton is imported, for the whole process."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def architecture_of(device: torch.device) -> str:
    """sm_90, gfx942, …: the name under which tables know a device. Raises KernelError for one that runs no Triton kernels."""
    if _pretended:
        return _pretended[-1]
    return _architecture(device.type, device.index)


@functools.cache
def _architecture(kind: str, index: int | None) -> str:
    if kind == "cuda":
        place = torch.cuda.current_device() if index is None else index
        if torch.version.hip is not None:
            return str(torch.cuda.get_device_properties(place).gcnArchName).partition(":")[0]
        major, minor = torch.cuda.get_device_capability(place)
        return f"sm_{major}{minor}"
    if kind == "cpu" and interpreted():
        return INTERPRETED_AS
    raise KernelError(f"Triton kernels do not run on {kind} (TRITON_INTERPRET=1 interprets them on a CPU, slowly); {REFERENCE_HINT}")


_pretended: list[str] = []


@contextmanager
def pretend(architecture: str) -> Iterator[None]:
    """Inside, every device counts as `architecture`: to compile for what is not here, or to interpret with its tiles."""
    _pretended.append(architecture)
    try:
        yield
    finally:
        _pretended.pop()


_forced: dict[str, Tile] = {}


@contextmanager
def forced(table: TileTable, tile: Tile) -> Iterator[None]:
    """Inside, `table` knows only `tile`: to measure what another one would do."""
    _forced[table.kernel] = tile
    try:
        yield
    finally:
        del _forced[table.kernel]
