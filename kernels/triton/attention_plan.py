"""A batch on the device, made once per step and used by every layer of one window.

Rows with one new token are decodes. A decode's keys are cut at multiples of a fixed number of tokens, counted from position 0,
so that a row's sums are taken in the same order whatever its neighbours are; each cut is one program per KV head.

    row 0, position 700, split 256:   0 … 255 │ 256 … 511 │ 512 … 700          three splits, summed up by the reduce kernel
    row 1, position  40               0 … 40                                    one split, which writes its result itself

Of a batch that recurs, lists of splits are padded with row -1, which is no work: a recorded step then serves until its rows have
four times as many splits, and not only until the next row has one more.

Rows with more tokens are chunks. A chunk's queries go in tiles whose size is the kernel's own affair; `Chunks.firsts` lets a
program find its row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch import CacheLayout, Int32, PagedBatch
from kernels.triton.attention_tiles import SPLIT_TILES
from kernels.triton.tiles import architecture_of

ALIGNMENT = 16  # bytes, of every array in the one upload
SPLITS_LEAST = 4  # of a row, that a padded list has places for; a longer one has four times as many, and so on
WINDOW_MOST = (1 << 31) - 1  # tokens: positions are 32 bits wide
NO_WORK = -1  # the row of what pads


@dataclass(frozen=True, slots=True)
class Decodes:
    """The splits of all rows with one new token, a row's lying together."""

    split_tokens: int
    rows: Tensor  # [S] int32 whose split; negative: no work
    indices: Tensor  # [S] int32 which of its row's: positions index · split_tokens …
    reduced_rows: Tensor  # [X] int32 rows of more than one split; negative: no work
    reduced_firsts: Tensor  # [X] int32 place of such a row's first split among the S


@dataclass(frozen=True, slots=True)
class Chunks:
    """The C rows with more than one new token."""

    rows: Tensor  # [C] int32
    firsts: Tensor  # [C + 1] int32, tokens of the chunks before
    tokens: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """With a `window` a query at position p attends to p - window + 1 … p; without one to 0 … p. Tensors are on the device."""

    layout: CacheLayout
    window: int | None
    page_limit: int  # pages named by the tables are below it
    starts: Tensor  # [R] int32
    cu_query_lengths: Tensor  # [R + 1] int32, place of a row's first token in the packed batch
    tables: Tensor  # [R, most pages of a row] int32
    slots: Tensor  # [T] int64, page · block_size + place in it
    decodes: Decodes
    chunks: Chunks

    def check(self, cache: Tensor) -> None:
        """Raises ValueError unless `cache` has the plan's layout and every page of the tables. Touches no device."""
        layout = self.layout
        inner = (2, layout.kv_heads, layout.block_size, layout.head_dim)
        if cache.ndim == 0 or cache.shape[1:] != inner:
            raise ValueError(f"cache: {list(cache.shape)}, but the plan's are contiguous {list(inner)} a page")
        if self.page_limit > cache.shape[0]:
            raise ValueError(f"tables: page {self.page_limit - 1} is named, the cache has {cache.shape[0]} pages")
        if not cache[0].is_contiguous():
            raise ValueError(f"cache: pages of strides {cache.stride()[1:]}, but the plan's are contiguous {list(inner)}")


def plan_attention(
    batch: PagedBatch, layout: CacheLayout, dtype: torch.dtype, device: torch.device, window: int | None = None
) -> AttentionPlan:
    """Plan for one step and for the layers of one `window` (tokens); `dtype` is that of the queries. One upload, no sync.

    ValueError where a row is empty, starts before 0, has no page for a position or names a negative page; KernelError where
    the device's architecture or `dtype` has no tiles.
    """
    _check(batch, layout, window)
    split = SPLIT_TILES.tile(architecture_of(device), dtype, layout.head_dim).split
    single = batch.counts == 1
    decodes, chunks = np.flatnonzero(single).astype(np.int32), np.flatnonzero(~single).astype(np.int32)
    positions = batch.starts[decodes]
    begins = np.zeros_like(positions) if window is None else np.maximum(0, positions + 1 - window) // split
    splits = positions // split - begins + 1
    first_split = np.cumsum(splits, dtype=np.int32) - splits
    several = np.flatnonzero(splits > 1)
    inside = np.arange(int(splits.sum()), dtype=np.int32) - np.repeat(first_split, splits)
    places, reductions = int(splits.sum()), several.size
    if batch.recurring:
        most = _splits_most(batch.tables.shape[1] * layout.block_size, split, window)
        places = _padded_splits(places, decodes.size, most)
        reductions = decodes.size if most > 1 else 0
    arrays = [
        batch.starts,
        _ends(batch.counts),
        batch.tables.reshape(-1),
        _slots(batch, layout).view(np.int32),
        _filled(np.repeat(decodes, splits), places),
        _filled(np.repeat(begins, splits) + inside, places),
        _filled(decodes[several], reductions),
        _filled(first_split[several], reductions),
        chunks,
        _ends(batch.counts[chunks]),
    ]
    starts, ends, tables, slots, rows, indices, reduced_rows, reduced_firsts, chunk_rows, chunk_firsts = _upload(arrays, device)
    return AttentionPlan(
        layout,
        window,
        int(batch.tables.max()) + 1,
        starts,
        ends,
        tables.view(batch.tables.shape),
        slots.view(torch.int64),
        Decodes(split, rows, indices, reduced_rows, reduced_firsts),
        Chunks(chunk_rows, chunk_firsts, int(batch.counts[chunks].sum())),
    )


def check_scales(scales: Tensor, cache: Tensor) -> None:
    """Raises ValueError unless `scales` are a cache's of eight bits."""
    if scales.shape != cache.shape[:-1] or scales.dtype is not torch.float32 or not scales.is_contiguous():
        raise ValueError(f"cache_scales: {list(scales.shape)} {scales.dtype}, wanted contiguous float32 {list(cache.shape[:-1])}")


def _check(batch: PagedBatch, layout: CacheLayout, window: int | None) -> None:
    if window is not None and not 1 <= window <= WINDOW_MOST:
        raise ValueError(f"window: {window} tokens, at least 1 and at most {WINDOW_MOST}")
    if min(layout.kv_heads, layout.block_size, layout.head_dim) < 1:
        raise ValueError(f"layout: {layout}, each at least 1")
    if batch.starts.ndim != 1 or batch.counts.shape != batch.starts.shape or batch.tables.shape[:-1] != batch.starts.shape:
        told = ", ".join(str(list(each.shape)) for each in (batch.starts, batch.counts, batch.tables))
        raise ValueError(f"batch: starts, counts and tables of {told}, wanted [R], [R] and [R, pages]")
    if batch.counts.size == 0 or int(batch.counts.min()) < 1 or int(batch.starts.min()) < 0:
        raise ValueError("batch: needs rows, each of at least one token from position 0 or later")
    last = int((batch.starts.astype(np.int64) + batch.counts).max()) - 1
    if last // layout.block_size >= batch.tables.shape[1]:
        raise ValueError(f"tables: {batch.tables.shape[1]} pages of {layout.block_size} tokens a row, but a row reaches position {last}")
    if int(batch.tables.min()) < 0:
        raise ValueError(f"tables: page {int(batch.tables.min())}")


def _splits_most(tokens: int, split: int, window: int | None) -> int:
    """Of a row of at most `tokens`: a window may begin inside a split and end inside another."""
    whole = -(-tokens // split)
    return whole if window is None else min(whole, (window - 1 + split - 1) // split + 1)


def _padded_splits(splits: int, rows: int, most: int) -> int:
    """How long a list of `splits` is made, of `rows` rows with at most `most` each: of few lengths, and under four times as long."""
    each = SPLITS_LEAST
    while each * rows < splits:
        each *= 4
    return rows * min(each, most)


def _filled(values: Int32, length: int) -> Int32:
    return np.concatenate((values, np.full(length - values.size, NO_WORK, np.int32)))


def _ends(counts: Int32) -> Int32:
    """[n] → [n + 1]: 0 and the running sum."""
    return np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))


def _slots(batch: PagedBatch, layout: CacheLayout) -> npt.NDArray[np.int64]:
    positions = batch.positions
    rows = np.repeat(np.arange(batch.counts.size), batch.counts)
    pages = batch.tables[rows, positions // layout.block_size].astype(np.int64)
    return pages * layout.block_size + positions % layout.block_size


def _upload(arrays: list[Int32], device: torch.device) -> list[Tensor]:
    """The arrays as views of one buffer on the device, each begun at a multiple of ALIGNMENT bytes."""
    step = ALIGNMENT // 4
    lengths = [array.size for array in arrays]
    firsts = [0]
    for length in lengths:
        firsts.append(firsts[-1] + -(-length // step) * step)
    pinned = device.type == "cuda"
    buffer = torch.zeros(max(firsts[-1], step), dtype=torch.int32, pin_memory=pinned)
    host = buffer.numpy()
    for array, first in zip(arrays, firsts, strict=False):
        host[first : first + array.size] = array
    there = buffer.to(device, non_blocking=True)
    return [there[first : first + length] for first, length in zip(firsts, lengths, strict=False)]
