"""Rows of a paged batch with everything else poisoned, for tests of attention kernels against the reference in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels.batch import CacheLayout, PagedBatch
from kernels.reference.attention_plan import plan_attention as plan_reference
from kernels.reference.paged_attention import paged_attention as attention_reference
from kernels.triton.attention_plan import AttentionPlan, plan_attention
from kernels.triton.paged_attention import paged_attention

CPU = torch.device("cpu")
NAN = float("nan")
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def relative_error(ours: Tensor, right: Tensor) -> float:
    """By norm; NaN where anything of ours is."""
    return float((ours.double() - right.double()).norm() / right.double().norm())


@dataclass(frozen=True)
class Shape:
    """kv_heads · group query heads."""

    kv_heads: int = 1
    group: int = 2
    dim: int = 64
    page: int = 16

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(self.kv_heads, self.page, self.dim)


@dataclass
class Rows:
    """(start, count) for each row, in shuffled pages. What no row holds is NaN: spare pages, and the rest of a last page."""

    lengths: list[tuple[int, int]]
    shape: Shape = field(default_factory=Shape)
    dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        shape, generator = self.shape, torch.Generator().manual_seed(0)
        starts, counts = (np.array(each, np.int32) for each in zip(*self.lengths, strict=True))
        pages = -(-(starts + counts) // shape.page)
        order = np.random.default_rng(1).permutation(int(pages.sum()) + 3).astype(np.int32)
        self.cache = torch.full((order.size, 2, shape.kv_heads, shape.page, shape.dim), NAN, dtype=self.dtype)
        tables = np.zeros((len(self.lengths), int(pages.max())), np.int32)
        used = 0
        for row, held in enumerate(pages.tolist()):
            mine = order[used : used + held]
            tables[row], tables[row, :held] = mine[0], mine
            for index, page in enumerate(mine.tolist()):
                filled = min(shape.page, int(starts[row] + counts[row]) - index * shape.page)
                fresh = torch.randn(2, shape.kv_heads, filled, shape.dim, generator=generator)
                self.cache[page, :, :, :filled] = fresh.to(self.dtype)
            used += held
        self.batch = PagedBatch(starts, counts, tables)
        width = shape.kv_heads * shape.group * shape.dim
        self.queries = torch.randn(int(counts.sum()), width, generator=generator).to(self.dtype)

    def plan(self, window: int | None = None) -> AttentionPlan:
        return plan_attention(self.batch, self.shape.layout, self.dtype, CPU, window)

    def ours(self, window: int | None = None, cap: float | None = None) -> Tensor:
        return paged_attention(self.queries, self.cache, self.plan(window), self.shape.dim**-0.5, cap)

    def right(self, window: int | None = None, cap: float | None = None) -> Tensor:
        """In float64 from what the cache holds, so that only our own rounding differs."""
        plan = plan_reference(self.batch, self.shape.layout, torch.float64, CPU, window)
        cache = self.cache.double().nan_to_num()
        return attention_reference(self.queries.double(), cache, plan, self.shape.dim**-0.5, cap)

    def error(self, window: int | None = None, cap: float | None = None) -> float:
        return relative_error(self.ours(window, cap), self.right(window, cap))

    def alone(self, row: int) -> Rows:
        """The same row of the same cache as a batch of its own."""
        first = int(self.batch.counts[:row].sum())
        pages = -(-int(self.batch.starts[row] + self.batch.counts[row]) // self.shape.page)
        single = Rows([self.lengths[row]], self.shape, self.dtype)
        single.cache = self.cache
        single.queries = self.queries[first : first + self.lengths[row][1]]
        single.batch = PagedBatch(
            self.batch.starts[row : row + 1], self.batch.counts[row : row + 1], self.batch.tables[row : row + 1, :pages]
        )
        return single


@dataclass(frozen=True)
class Poison:
    """Fills what kernels leave unwritten: torch.empty gives NaN inside."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)  # with fill_uninitialized_memory, on by default

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)
