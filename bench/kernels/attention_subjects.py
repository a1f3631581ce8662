"""Subjects over a paged cache: rope with the cache write, attention of decodes and of chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.kernels.subject import TOLERANCES, Call, Ground, Subject
from kernels.batch import CacheLayout, PagedBatch
from kernels.reference import attention_plan as reference_plan
from kernels.reference import paged_attention as attention_reference
from kernels.reference import rope_kv_write as rope_reference
from kernels.reference.cache_form import dequantize_heads, quantize_heads
from kernels.reference.rope_kv_write import HeadNorms
from kernels.triton import attention_plan, costs
from kernels.triton.attention_tiles import SPLIT_TILES
from kernels.triton.paged_attention import paged_attention
from kernels.triton.rope_kv_write import rope_kv_write

EPSILON = 1e-6
EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# What codes of eight bits lose: int8 codes are looked at beside what they mean, and both sides round half a code differently.
ROUNDED = {"": 0.0, "int8": 4e-3, "fp8": 1.5e-2}


@dataclass(frozen=True, slots=True)
class Rows:
    """(start, count) of each row, with pages of `page` tokens dealt out at random; `form` of the cache: '', int8 or fp8."""

    rows: tuple[tuple[int, int], ...]
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page: int = 16
    form: str = ""
    window: int | None = None
    soft_cap: float | None = None

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(self.kv_heads, self.page, self.dim)

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.rows)

    def batch(self) -> PagedBatch:
        starts, counts = (np.array(each, np.int32) for each in zip(*self.rows, strict=True))
        pages = -(-(starts + counts) // self.page)
        order = np.random.default_rng(0).permutation(int(pages.sum())).astype(np.int32)
        tables = np.zeros((len(self.rows), int(pages.max())), np.int32)
        for row, mine in enumerate(np.split(order, np.cumsum(pages)[:-1])):
            tables[row], tables[row, : mine.size] = mine[0], mine
        return PagedBatch(starts, counts, tables)

    def shape(self, dtype: torch.dtype) -> costs.Heads:
        return costs.Heads(self.heads, self.kv_heads, self.dim, dtype.itemsize, 1 if self.form else dtype.itemsize)

    def __str__(self) -> str:
        many = {row: self.rows.count(row) for row in self.rows}
        listed = " + ".join(f"{times}×({start},{count})" for (start, count), times in many.items())
        changes = [self.form, f"window {self.window}" if self.window else "", "soft cap" if self.soft_cap else ""]
        return " ".join([listed, f"h{self.heads}/{self.kv_heads} D{self.dim}", *filter(None, changes)])


@dataclass(frozen=True, slots=True)
class _Cache:
    pages: Tensor
    scales: Tensor | None


def _cache(ground: Ground, rows: Rows, dtype: torch.dtype, pages: int) -> _Cache:
    exact = ground.normal(dtype, pages, 2, rows.kv_heads, rows.page, rows.dim)
    if not rows.form:
        return _Cache(exact, None)
    codes, scales = quantize_heads(exact.float(), EIGHT_BITS[rows.form])
    if ground.exact:
        return _Cache(dequantize_heads(codes, scales, torch.float64), None)
    return _Cache(codes, scales)


def _plan(ground: Ground, rows: Rows, dtype: torch.dtype, batch: PagedBatch) -> Any:
    if ground.exact:
        return reference_plan.plan_attention(batch, rows.layout, torch.float64, ground.device, rows.window)
    return attention_plan.plan_attention(batch, rows.layout, dtype, ground.device, rows.window)


def attention(rows: Rows, dtype: torch.dtype) -> Subject:
    chunks = any(count > 1 for _, count in rows.rows)

    def build(ground: Ground) -> Call:
        batch = rows.batch()
        cache = _cache(ground, rows, dtype, int(batch.tables.max()) + 1)
        queries = ground.other(1).normal(dtype, rows.tokens, rows.heads * rows.dim)
        plan = _plan(ground, rows, dtype, batch)
        run = attention_reference.paged_attention if ground.exact else paged_attention
        return lambda: [run(queries, cache.pages, plan, rows.dim**-0.5, rows.soft_cap, cache.scales)]

    cost = costs.paged_attention(rows.rows, rows.shape(dtype), rows.window, split_tokens(dtype, rows.dim))
    wide = chunks and dtype.itemsize == 2 and rows.dim <= 128
    return Subject("paged_attention", str(rows), dtype, build, cost, TOLERANCES[dtype] + ROUNDED[rows.form], wide_matrix=wide)


def split_tokens(dtype: torch.dtype, dim: int) -> int:
    """The same on every architecture."""
    return SPLIT_TILES.tile("sm_90", dtype, dim).split


def rope(rows: Rows, dtype: torch.dtype, norms: bool = False) -> Subject:
    def build(ground: Ground) -> Call:
        batch = rows.batch()
        plan = _plan(ground, rows, dtype, batch)
        cache = _empty_cache(ground, rows, dtype, int(batch.tables.max()) + 1)
        qkv = ground.normal(dtype, rows.tokens, (rows.heads + 2 * rows.kv_heads) * rows.dim)
        angles = ground.other(1).normal(torch.float32, rows.tokens, rows.dim // 2)
        cosine, sine = torch.cat((angles.cos(), angles.cos()), 1), torch.cat((-angles.sin(), angles.sin()), 1)
        weights = [ground.other(2 + which).normal(dtype, rows.dim) for which in (0, 1)] if norms else None
        head_norms = HeadNorms(weights[0], weights[1], EPSILON) if weights else None
        run = rope_reference.rope_kv_write if ground.exact else rope_kv_write

        def call() -> list[Tensor]:
            queries = run(qkv, cosine, sine, cache.pages, plan, head_norms, cache.scales)
            if cache.scales is None:
                return [queries, cache.pages]
            return [queries, dequantize_heads(cache.pages, cache.scales, torch.float64)]

        return call

    title = f"T{rows.tokens} h{rows.heads}/{rows.kv_heads} D{rows.dim}{' normed' if norms else ''}{' ' + rows.form if rows.form else ''}"
    cost = costs.rope_kv_write(rows.tokens, rows.shape(dtype), norms)
    return Subject("rope_kv_write", title, dtype, build, cost, TOLERANCES[dtype] + 2 * ROUNDED[rows.form])


def _empty_cache(ground: Ground, rows: Rows, dtype: torch.dtype, pages: int) -> _Cache:
    shape = (pages, 2, rows.kv_heads, rows.page, rows.dim)
    if ground.exact:
        return _Cache(torch.zeros(shape, dtype=torch.float64, device=ground.device), None)
    if not rows.form:
        return _Cache(torch.zeros(shape, dtype=dtype, device=ground.device), None)
    zeros = torch.zeros(shape, dtype=torch.uint8, device=ground.device).view(EIGHT_BITS[rows.form])
    return _Cache(zeros, torch.zeros(shape[:-1], dtype=torch.float32, device=ground.device))
