"""Rotary position embedding of queries and keys, and the write of keys and values into the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.attention_plan import AttentionPlan
from kernels.reference.cache_form import quantize_heads


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """A head x becomes x / sqrt(mean(x²) + epsilon) · weight before it is rotated; weights [D], one for queries, one for keys."""

    query: Tensor
    key: Tensor
    epsilon: float


def rope_kv_write(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    norms: HeadNorms | None = None,
    cache_scales: Tensor | None = None,
) -> Tensor:
    """Normalises heads where `norms` are given, rotates, writes keys and values to their pages, returns the queries [T, heads · D].

    qkv [T, (heads + 2 · kv_heads) · D] = (queries | keys | values); cosine and sine [T, D] in float32 (or float64), the halves
    equal in cosine and of opposite sign in sine: (-sin | sin). A head (a | b) becomes (a·cos - b·sin | b·cos + a·sin).
    cache [pages, 2, kv_heads, block, D] is written at plan.slots. With `cache_scales` [pages, 2, kv_heads, block] (float32, written
    too) the cache is one of eight bits (see cache_form), made from keys that were not rounded to the layers' dtype before.
    """
    kv_heads, dim = plan.layout.kv_heads, plan.layout.head_dim
    tokens = qkv.shape[0]
    turned_width = qkv.shape[1] - kv_heads * dim
    heads = qkv[:, :turned_width].view(tokens, -1, dim)
    if norms is not None:
        heads = _normed(heads, norms, kv_heads)
    half = dim // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    exact = torch.addcmul(heads * cosine[:, None, :], swapped, sine[:, None, :])
    turned = exact.to(qkv.dtype)
    query_heads = turned.shape[1] - kv_heads
    values = qkv[:, turned_width:].view(tokens, kv_heads, dim)
    if cache_scales is None:
        fresh = torch.cat((turned[:, query_heads:], values), dim=1)
        cache.view(-1, dim).index_copy_(0, plan.slots, fresh.view(-1, dim))
    else:
        codes, scales = quantize_heads(torch.cat((exact[:, query_heads:], values), dim=1), cache.dtype)
        cache.view(-1, dim).view(torch.uint8).index_copy_(0, plan.slots, codes.view(-1, dim).view(torch.uint8))
        cache_scales.view(-1).index_copy_(0, plan.slots, scales.view(-1))
    return turned[:, :query_heads].reshape(tokens, query_heads * dim)


def _normed(heads: Tensor, norms: HeadNorms, kv_heads: int) -> Tensor:
    """heads [T, heads + kv_heads, D], queries first; in the precision of the angles, not rounded before they are turned."""
    query_heads = heads.shape[1] - kv_heads
    exact = heads.double() if heads.dtype is torch.float64 else heads.float()
    scale = exact.square().mean(-1, keepdim=True).add_(norms.epsilon).rsqrt_()
    weights = torch.cat((norms.query.expand(query_heads, -1), norms.key.expand(kv_heads, -1)))
    return exact * scale * weights
