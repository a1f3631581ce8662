"""Which all-reduce carries a tensor of what size between GPUs: NCCL, or one of torch's over symmetric memory (NVLink, one node).

The table is data. As long as nothing has been measured on the hardware in question, everything goes by NCCL; RANTANG_ALL_REDUCE names
another table, e.g. `one_shot:262144,two_shot:8388608` (method: largest size in bytes; beyond the last, NCCL).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

VARIABLE = "RANTANG_ALL_REDUCE"
NCCL = "nccl"
METHODS = ("one_shot", "two_shot", "multimem")


class AllReduceError(Exception):
    """A table that cannot be used; one line."""


@dataclass(frozen=True, slots=True)
class SizeTable:
    """Methods by rising size: the first whose limit (bytes) holds the tensor; NCCL where none does."""

    limits: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> SizeTable:
        """Raises AllReduceError for unknown methods, sizes that are no numbers, and sizes that do not rise."""
        if text in ("", NCCL):
            return cls()
        limits: list[tuple[str, int]] = []
        for entry in text.split(","):
            method, _, size = entry.partition(":")
            if method not in METHODS or not size.isdigit() or int(size) <= (limits[-1][1] if limits else 0):
                raise AllReduceError(
                    f"{VARIABLE}={text}: {entry!r} is not one of {', '.join(METHODS)} with a size in bytes above the one before"
                )
            limits.append((method, int(size)))
        return cls(tuple(limits))

    @property
    def largest(self) -> int:
        return self.limits[-1][1] if self.limits else 0

    def method(self, size_bytes: int) -> str:
        return next((method for method, limit in self.limits if size_bytes <= limit), NCCL)


class SizedAllReduce:
    """Sums tensors in place over the default group, each by its size's method. `ops` and `memory` are torch's, replaced in tests."""

    def __init__(
        self, table: SizeTable, nccl: Callable[[Tensor], object], group_name: str, device: torch.device, ops: Any = None, memory: Any = None
    ) -> None:
        """Collective when the table names a method over symmetric memory: all ranks exchange their buffers' addresses."""
        self._table = table
        self._nccl = nccl
        self._group = group_name
        self._buffer: Tensor | None = None
        if table.limits:
            self._ops = ops if ops is not None else torch.ops.symm_mem
            memory = memory if memory is not None else importlib.import_module("torch.distributed._symmetric_memory")
            self._buffer = memory.empty(table.largest, dtype=torch.uint8, device=device)
            memory.rendezvous(self._buffer, group_name)

    def __call__(self, tensor: Tensor) -> Tensor:
        """`tensor` contiguous; returns it."""
        size = tensor.numel() * tensor.element_size()
        method = self._table.method(size)
        if method == NCCL or self._buffer is None:
            self._nccl(tensor)
            return tensor
        shared = self._buffer[:size].view(tensor.dtype).view(tensor.shape)
        shared.copy_(tensor)
        if method == "one_shot":
            return tensor.copy_(self._ops.one_shot_all_reduce(shared, "sum", self._group))
        reduce = self._ops.two_shot_all_reduce_ if method == "two_shot" else self._ops.multimem_all_reduce_
        reduce(shared, "sum", self._group)
        return tensor.copy_(shared)


def wanted_table() -> SizeTable:
    """What the environment says."""
    return SizeTable.parse(os.environ.get(VARIABLE, ""))
