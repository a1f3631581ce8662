"""Everything about a batch that all layers share: where tokens go, which pages are read, what is masked.

Built once per step, so that a layer costs a handful of operators whatever the batch. Rows with one new token (decodes) are
gathered together, padded to a common length; rows of similar length share a group, so that one long context does not make
thirty short ones pay. Rows with more tokens (chunks of a prompt) go one by one, in tiles of queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.batch import CacheLayout, Int32, PagedBatch

PADDING_PAGES_MAX = 64  # gathering this many pages in vain costs about as much as one more group
QUERY_TILE = 512  # tokens; bounds a mask to this many rows


@dataclass(frozen=True, slots=True)
class _Batch:
    """A packed batch with what is derived from it for every row, and where and for which window it is planned."""

    packed: PagedBatch
    layout: CacheLayout
    dtype: torch.dtype
    device: torch.device
    window: int | None
    first: np.ndarray  # [R] place of a row's first token in the packed batch


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """B rows with one new token each. pages [B · 2 · kv_heads · P] index the cache seen as [pages · 2 · kv_heads, block · D]."""

    tokens: Tensor | None  # [B] their places in the packed batch; None: the whole batch in order
    pages: Tensor
    mask: Tensor  # [B, 1, 1, P · block], 0 or -inf
    rows: int


@dataclass(frozen=True, slots=True)
class ChunkTile:
    """Queries [first, first + count) of the packed batch, all of one row; keys are the first `keys` positions of its pages."""

    first: int
    count: int
    keys: int
    pages: Tensor  # [2 · kv_heads · P]
    mask: Tensor | None  # [count, keys], 0 or -inf; None: plain causal (count == keys)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """With a `window` a query at position p attends to p - window + 1 … p; without one to 0 … p."""

    layout: CacheLayout
    slots: Tensor  # [T · 2 · kv_heads] where each token's keys and values go in the cache seen as [pages · 2 · kv_heads · block, D]
    groups: tuple[DecodeGroup, ...]
    tiles: tuple[ChunkTile, ...]
    window: int | None = None


def plan_attention(
    batch: PagedBatch, layout: CacheLayout, dtype: torch.dtype, device: torch.device, window: int | None = None
) -> AttentionPlan:
    """Plan for one step and for the layers of one `window` (tokens); `dtype` is that of queries and cache."""
    known = _Batch(batch, layout, dtype, device, window, np.cumsum(batch.counts) - batch.counts)
    single = batch.counts == 1
    decodes = np.flatnonzero(single)
    pages = -(-(batch.starts + batch.counts) // layout.block_size)
    begins = np.zeros_like(pages) if window is None else np.maximum(0, batch.starts + 1 - window) // layout.block_size
    groups = [_decode_group(known, members, begins, pages - begins) for members in split_by_pages(decodes, pages - begins)]
    tiles = [tile for row in np.flatnonzero(~single) for tile in _chunk_tiles(known, int(row))]
    return AttentionPlan(layout, _slots(batch, layout, device), tuple(groups), tuple(tiles), window)


def split_by_pages(rows: np.ndarray, pages: Int32) -> list[np.ndarray]:
    """Rows, in groups whose padding to the group's longest is at most a quarter of its own pages plus PADDING_PAGES_MAX.

    Groups depend on lengths alone; inside a group rows keep their order.
    """
    if rows.size == 0:
        return []
    longest_first = rows[np.argsort(-pages[rows], kind="stable")]
    groups: list[list[int]] = []
    used = 0
    for row in longest_first:
        need = int(pages[row])
        padding = int(pages[groups[-1][0]]) * (len(groups[-1]) + 1) - used - need if groups else 0
        if groups and padding <= (used + need) // 4 + PADDING_PAGES_MAX:
            groups[-1].append(int(row))
            used += need
        else:
            groups.append([int(row)])
            used = need
    return [np.array(sorted(group)) for group in groups]


def _slots(batch: PagedBatch, layout: CacheLayout, device: torch.device) -> Tensor:
    positions = batch.positions.astype(np.int64)
    rows = np.repeat(np.arange(batch.counts.size), batch.counts)
    page = batch.tables[rows, positions // layout.block_size].astype(np.int64)
    heads = np.arange(2 * layout.kv_heads)
    lanes = page[:, None] * (2 * layout.kv_heads) + heads
    return torch.from_numpy((lanes * layout.block_size + (positions % layout.block_size)[:, None]).reshape(-1)).to(device)


def _lanes(table: Int32, layout: CacheLayout, device: torch.device) -> Tensor:
    """[…, P] pages → flat index of […, 2 · kv_heads, P] lanes (one lane: one head's keys or values in one page)."""
    heads = np.arange(2 * layout.kv_heads)[:, None]
    return torch.from_numpy((table[..., None, :].astype(np.int64) * (2 * layout.kv_heads) + heads).reshape(-1)).to(device)


def _decode_group(known: _Batch, members: np.ndarray, begins: Int32, pages: Int32) -> DecodeGroup:
    """`begins` [R] is the first page of each row that is read, `pages` [R] how many; a shorter row is padded with its own."""
    batch, layout, device = known.packed, known.layout, known.device
    width = int(pages[members].max())
    table = batch.tables[members, :width]
    if known.window is not None:
        inside = np.minimum(np.arange(width, dtype=np.int32), (pages[members] - 1)[:, None])
        table = np.take_along_axis(batch.tables[members], begins[members][:, None] + inside, axis=1)
    positions = (begins[members] * layout.block_size)[:, None] + np.arange(width * layout.block_size, dtype=np.int32)
    starts = batch.starts[members][:, None]
    hidden = positions > starts
    if known.window is not None:
        hidden |= positions <= starts - known.window
    mask = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0)))[:, None, None, :].to(device=device, dtype=known.dtype)
    whole = members.size == batch.counts.size
    tokens = None if whole else torch.from_numpy(known.first[members].astype(np.int64)).to(device)
    return DecodeGroup(tokens, _lanes(table, layout, device), mask, members.size)


def _chunk_tiles(known: _Batch, row: int) -> list[ChunkTile]:
    batch, size, window = known.packed, known.layout.block_size, known.window
    start, total, first = int(batch.starts[row]), int(batch.counts[row]), int(known.first[row])
    tiles = []
    for offset in range(0, total, QUERY_TILE):
        count = min(QUERY_TILE, total - offset)
        end = start + offset + count
        begin = 0 if window is None else max(0, start + offset + 1 - window) // size
        keys = end - begin * size
        mask = None
        if keys != count or (window is not None and window < count):
            mask = torch.full((count, keys), float("-inf"), dtype=known.dtype, device=known.device).triu_(keys - count + 1)
            if window is not None:
                mask += torch.full_like(mask, float("-inf")).tril_(keys - count - window)
        table = batch.tables[row, begin : -(-end // size)]
        tiles.append(ChunkTile(first + offset, count, keys, _lanes(table, known.layout, known.device), mask))
    return tiles
