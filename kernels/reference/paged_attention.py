"""Causal attention of a packed batch over a paged cache, with grouped query heads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.reference.attention_plan import AttentionPlan, ChunkTile, DecodeGroup


def paged_attention(queries: Tensor, cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """softmax(q·kᵀ · scale) · v over each token's own sequence up to itself, no further back than plan.window; returns [T, heads · D].

    queries [T, heads · D], rotated; cache [pages, 2, kv_heads, block, D] already holds the keys and values of these tokens.
    Query head h reads KV head h // (heads / kv_heads).
    """
    if len(plan.groups) == 1 and plan.groups[0].tokens is None:
        return _decode(queries, cache, plan, plan.groups[0], scale)
    out = torch.empty_like(queries)
    for group in plan.groups:
        assert group.tokens is not None
        out.index_copy_(0, group.tokens, _decode(queries.index_select(0, group.tokens), cache, plan, group, scale))
    for tile in plan.tiles:
        out[tile.first : tile.first + tile.count] = _chunk(queries, cache, plan, tile, scale)
    return out


def _decode(queries: Tensor, cache: Tensor, plan: AttentionPlan, group: DecodeGroup, scale: float) -> Tensor:
    """One query per row: the heads that share a KV head are its queries. queries [B, heads · D] → [B, heads · D]."""
    keys, values = _gather(cache, plan, group.pages, group.rows)
    dim = plan.layout.head_dim
    grouped = queries.view(group.rows, plan.layout.kv_heads, -1, dim)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask, scale=scale)
    return out.reshape(queries.shape)


def _chunk(queries: Tensor, cache: Tensor, plan: AttentionPlan, tile: ChunkTile, scale: float) -> Tensor:
    """Many queries of one row. queries [T, heads · D] → [count, heads · D]."""
    keys, values = _gather(cache, plan, tile.pages, 1)
    dim = plan.layout.head_dim
    asked = queries[tile.first : tile.first + tile.count].view(1, tile.count, -1, dim).transpose(1, 2)
    out = scaled_dot_product_attention(
        asked,
        keys[:, :, : tile.keys],
        values[:, :, : tile.keys],
        attn_mask=tile.mask,
        is_causal=tile.mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out.transpose(1, 2).reshape(tile.count, -1)


def _gather(cache: Tensor, plan: AttentionPlan, pages: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Keys and values [rows, kv_heads, P · block, D] of the pages, as two views of one copy."""
    layout = plan.layout
    lanes = cache.view(-1, layout.block_size * layout.head_dim).index_select(0, pages)
    both = lanes.view(rows, 2, layout.kv_heads, -1, layout.head_dim)
    return both[:, 0], both[:, 1]
