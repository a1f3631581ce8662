"""Causal attention of a packed batch over a paged cache, with grouped query heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.reference.attention_plan import AttentionPlan, ChunkTile, DecodeGroup
from kernels.reference.cache_form import dequantize_heads


@dataclass(frozen=True, slots=True)
class _Softmax:
    scale: float
    cap: float | None


def paged_attention(
    queries: Tensor, cache: Tensor, plan: AttentionPlan, scale: float, soft_cap: float | None = None, cache_scales: Tensor | None = None
) -> Tensor:
    """softmax(q·kᵀ · scale) · v over each token's own sequence up to itself, no further back than plan.window; returns [T, heads · D].

    queries [T, heads · D], rotated; cache [pages, 2, kv_heads, block, D] already holds the keys and values of these tokens.
    Query head h reads KV head h // (heads / kv_heads). With a `soft_cap` c a score s becomes c · tanh(s / c) before the softmax.
    With `cache_scales` [pages, 2, kv_heads, block] the cache holds codes of eight bits (see cache_form).
    """
    softmax = _Softmax(scale, soft_cap)
    pages = _Pages(cache, cache_scales, plan, queries.dtype)
    if len(plan.groups) == 1 and plan.groups[0].tokens is None:
        return _decode(queries, pages, plan.groups[0], softmax)
    out = torch.empty_like(queries)
    for group in plan.groups:
        assert group.tokens is not None
        out.index_copy_(0, group.tokens, _decode(queries.index_select(0, group.tokens), pages, group, softmax))
    for tile in plan.tiles:
        out[tile.first : tile.first + tile.count] = _chunk(queries, pages, tile, softmax)
    return out


@dataclass(frozen=True, slots=True)
class _Pages:
    cache: Tensor
    scales: Tensor | None
    plan: AttentionPlan
    dtype: torch.dtype

    def gather(self, pages: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, kv_heads, P · block, D] of the pages, as two views of one copy."""
        layout = self.plan.layout
        lanes = self.cache.view(-1, layout.block_size * layout.head_dim)
        if self.scales is None:
            both = lanes.index_select(0, pages)
        else:
            codes = lanes.view(torch.uint8).index_select(0, pages).view(self.cache.dtype)
            scales = self.scales.view(-1, layout.block_size).index_select(0, pages)
            both = dequantize_heads(codes.view(-1, layout.block_size, layout.head_dim), scales, self.dtype)
        both = both.view(rows, 2, layout.kv_heads, -1, layout.head_dim)
        return both[:, 0], both[:, 1]


def _decode(queries: Tensor, pages: _Pages, group: DecodeGroup, softmax: _Softmax) -> Tensor:
    """One query per row: the heads that share a KV head are its queries. queries [B, heads · D] → [B, heads · D]."""
    keys, values = pages.gather(group.pages, group.rows)
    layout = pages.plan.layout
    grouped = queries.view(group.rows, layout.kv_heads, -1, layout.head_dim)
    if softmax.cap is not None:
        return _capped(grouped, keys, values, group.mask, softmax).reshape(queries.shape)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask, scale=softmax.scale)
    return out.reshape(queries.shape)


def _chunk(queries: Tensor, pages: _Pages, tile: ChunkTile, softmax: _Softmax) -> Tensor:
    """Many queries of one row. queries [T, heads · D] → [count, heads · D]."""
    keys, values = pages.gather(tile.pages, 1)
    keys, values = keys[:, :, : tile.keys], values[:, :, : tile.keys]
    asked = queries[tile.first : tile.first + tile.count].view(1, tile.count, -1, pages.plan.layout.head_dim).transpose(1, 2)
    if softmax.cap is not None:
        group = asked.shape[1] // keys.shape[1]
        mask = tile.mask
        if mask is None:
            mask = torch.full((tile.count, tile.keys), float("-inf"), dtype=asked.dtype, device=asked.device).triu_(1)
        out = _capped(asked, keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), mask, softmax)
    else:
        causal = tile.mask is None
        out = scaled_dot_product_attention(asked, keys, values, tile.mask, is_causal=causal, scale=softmax.scale, enable_gqa=True)
    return out.transpose(1, 2).reshape(tile.count, -1)


def _capped(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, softmax: _Softmax) -> Tensor:
    """[…, Q, D] · […, K, D] → […, Q, D], scores capped in the precision of the queries."""
    assert softmax.cap is not None
    scores = (queries @ keys.transpose(-1, -2) * (softmax.scale / softmax.cap)).tanh() * softmax.cap
    return (scores + mask).softmax(-1) @ values
