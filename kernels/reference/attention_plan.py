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
class DecodeGroup:
    """B rows with one new token each. pages [B · 2 · kv_heads · P] index the cache seen as [pages · 2 · kv_heads, block · D]."""

    tokens: Tensor | None  # [B] their places in the packed batch; None: the whole batch in order
    pages: Tensor
    mask: Tensor  # [B, 1, 1, P · block], 0 or -inf
    rows: int


@dataclass(frozen=True, slots=True)
class ChunkTile:
    """Queries [first, first + count) of the packed batch, all of one row; keys are its positions 0 … keys - 1."""

    first: int
    count: int
    keys: int
    pages: Tensor  # [2 · kv_heads · P]
    mask: Tensor | None  # [count, keys], 0 or -inf; None: plain causal (count == keys)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    layout: CacheLayout
    slots: Tensor  # [T · 2 · kv_heads] where each token's keys and values go in the cache seen as [pages · 2 · kv_heads · block, D]
    groups: tuple[DecodeGroup, ...]
    tiles: tuple[ChunkTile, ...]


def plan_attention(batch: PagedBatch, layout: CacheLayout, dtype: torch.dtype, device: torch.device) -> AttentionPlan:
    """Plan for one step; `dtype` is that of queries and cache."""
    pages = -(-(batch.starts + batch.counts) // layout.block_size)
    single = batch.counts == 1
    first = np.cumsum(batch.counts) - batch.counts
    decodes = np.flatnonzero(single)
    groups = [
        _decode_group(batch, members, first, pages, layout, dtype, device, whole=members.size == batch.counts.size)
        for members in split_by_pages(decodes, pages)
    ]
    tiles = [tile for row in np.flatnonzero(~single) for tile in _chunk_tiles(batch, int(row), int(first[row]), layout, dtype, device)]
    return AttentionPlan(layout, _slots(batch, layout, device), tuple(groups), tuple(tiles))


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


def _decode_group(
    batch: PagedBatch,
    members: np.ndarray,
    first: np.ndarray,
    pages: Int32,
    layout: CacheLayout,
    dtype: torch.dtype,
    device: torch.device,
    *,
    whole: bool,
) -> DecodeGroup:
    width = int(pages[members].max())
    keys = width * layout.block_size
    beyond = np.arange(keys)[None, :] > batch.starts[members][:, None]
    mask = torch.from_numpy(np.where(beyond, np.float32(-np.inf), np.float32(0)))[:, None, None, :].to(device=device, dtype=dtype)
    tokens = None if whole else torch.from_numpy(first[members].astype(np.int64)).to(device)
    return DecodeGroup(tokens, _lanes(batch.tables[members, :width], layout, device), mask, members.size)


def _chunk_tiles(batch: PagedBatch, row: int, first: int, layout: CacheLayout, dtype: torch.dtype, device: torch.device) -> list[ChunkTile]:
    start, total = int(batch.starts[row]), int(batch.counts[row])
    tiles = []
    for offset in range(0, total, QUERY_TILE):
        count = min(QUERY_TILE, total - offset)
        keys = start + offset + count
        pages = -(-keys // layout.block_size)
        mask = None
        if keys != count:
            mask = torch.full((count, keys), float("-inf"), dtype=dtype, device=device).triu_(keys - count + 1)
        tiles.append(ChunkTile(first + offset, count, keys, _lanes(batch.tables[row, :pages], layout, device), mask))
    return tiles
