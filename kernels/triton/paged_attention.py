"""Causal attention of a packed batch over a paged cache, with grouped query heads: the launcher.

    out[t, h] = Σ softmax over keys p of (q[t, h] · k[p, h // group] · scale) · v[p, h // group],  p ≤ position of t, within the window

Rows with one new token go to decode_attention, the others to chunk_attention; formulas, bytes and operations are told there. A row's
bits do not depend on the rest of the batch. Queries in float32, float16 or bfloat16; the cache in the same dtype, int8 or fp8 (e4m3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.errors import KernelError
from kernels.triton.attention_plan import AttentionPlan, check_scales
from kernels.triton.attention_tiles import CHUNK_TILES, REDUCE_TILES, SPLIT_TILES
from kernels.triton.chunk_attention import chunk_kernel
from kernels.triton.decode_attention import reduce_kernel, split_kernel
from kernels.triton.tiles import architecture_of, name_of

KNOWS_FP8 = ("sm_90", "sm_100")  # e4m3 in hardware; elsewhere its bits are taken apart


@dataclass(frozen=True, slots=True)
class _Call:
    """What both kernels take, as they take it."""

    tensors: tuple[Tensor, ...]  # queries, cache, scales
    plan: AttentionPlan
    numbers: dict[str, int | float]
    constants: dict[str, int | bool | str]
    architecture: str
    dtype: torch.dtype


def paged_attention(
    queries: Tensor, cache: Tensor, plan: AttentionPlan, scale: float, soft_cap: float | None = None, cache_scales: Tensor | None = None
) -> Tensor:
    """softmax(q·kᵀ · scale) · v over each token's own sequence up to itself, no further back than plan.window; returns [T, heads · D].

    queries [T, heads · D], rows anywhere; cache [pages, 2, kv_heads, block, D], pages contiguous, anywhere. With a `soft_cap` c a score
    s becomes c · tanh(s / c). With `cache_scales` [pages, 2, kv_heads, block] (float32, contiguous) the cache holds codes of eight bits
    (see reference/cache_form). ValueError where shapes do not fit or the tables name a page that the cache has not; KernelError where no
    tile serves.
    """
    plan.check(cache)
    call = _prepare(queries, cache, plan, scale, soft_cap, cache_scales)
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    if plan.decodes.rows.numel():
        _decode(call, out)
    if plan.chunks.tokens:
        _prefill(call, out)
    return out


def _prepare(
    queries: Tensor, cache: Tensor, plan: AttentionPlan, scale: float, soft_cap: float | None, cache_scales: Tensor | None
) -> _Call:
    layout = plan.layout
    group, rest = divmod(queries.shape[-1], layout.kv_heads * layout.head_dim)
    if queries.ndim != 2 or rest or not group or queries.stride(1) != 1 or queries.shape[0] != plan.slots.numel():
        raise ValueError(f"queries: {list(queries.shape)} for {plan.slots.numel()} tokens and {layout}")
    if not 0 < scale < math.inf or not 0 < (1.0 if soft_cap is None else soft_cap) < math.inf:
        raise ValueError(f"scale and soft_cap: {scale} and {soft_cap}, both above 0 and finite")
    architecture = architecture_of(queries.device)
    form = _form(queries, cache, cache_scales, architecture)
    held = {"fp8": torch.float8_e4m3fn, "fp8_bits": torch.uint8}.get(form)
    window = 0 if plan.window is None else plan.window
    numbers = {
        "query_stride": queries.stride(0),
        "page_stride": cache.stride(0),
        "table_stride": plan.tables.stride(0),
        "scale": scale,
        "soft_cap": 1.0 if soft_cap is None else soft_cap,
        "window": window,
    }
    constants: dict[str, int | bool | str] = {
        "WINDOWED": plan.window is not None,
        "CAPPED": soft_cap is not None,
        "FORM": form,
        "KV_HEADS": layout.kv_heads,
        "GROUP": group,
        "PAGE": layout.block_size,
        "DIM": layout.head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(layout.head_dim)),
    }
    scales = queries if cache_scales is None else cache_scales  # without scales nothing is read there
    return _Call((queries, cache if held is None else cache.view(held), scales), plan, numbers, constants, architecture, queries.dtype)


def _form(queries: Tensor, cache: Tensor, scales: Tensor | None, architecture: str) -> str:
    """How the kernel reads the cache."""
    if scales is None:
        if cache.dtype is not queries.dtype:
            raise KernelError(f"paged_attention: a cache of {name_of(cache.dtype)} without scales for queries of {name_of(queries.dtype)}")
        return "plain"
    check_scales(scales, cache)
    if cache.dtype is torch.int8:
        return "int8"
    if cache.dtype is torch.float8_e4m3fn:
        return "fp8" if architecture in KNOWS_FP8 else "fp8_bits"
    raise KernelError(f"paged_attention: a cache of {name_of(cache.dtype)} with scales (it does int8, float8_e4m3fn)")


def _decode(call: _Call, out: Tensor) -> None:
    plan, constants = call.plan, call.constants
    decodes, layout = plan.decodes, plan.layout
    tile = SPLIT_TILES.tile(call.architecture, call.dtype, layout.head_dim)
    splits, heads = decodes.rows.numel(), out.shape[1] // layout.head_dim
    several = decodes.reduced_rows.numel()
    partial = torch.empty((splits if several else 0, heads, layout.head_dim), dtype=torch.float32, device=out.device)
    weights = torch.empty((splits if several else 0, heads), dtype=torch.float32, device=out.device)
    block_m = max(tile.m, triton.next_power_of_2(heads // layout.kv_heads))
    split_kernel[(splits, layout.kv_heads)](
        *call.tensors, out, partial, weights, plan.starts, plan.cu_query_lengths, plan.tables, decodes.rows, decodes.indices,
        **call.numbers, **constants, SPLIT=decodes.split_tokens, BLOCK_M=block_m, BLOCK_N=tile.n,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if several:
        tile = REDUCE_TILES.tile(call.architecture, call.dtype, layout.head_dim)
        reduce_kernel[(several, heads)](
            partial, weights, out, plan.starts, plan.cu_query_lengths, decodes.reduced_rows, decodes.reduced_firsts, call.numbers["window"],
            WINDOWED=constants["WINDOWED"], HEADS=heads, DIM=layout.head_dim, SPLIT=decodes.split_tokens,
            BLOCK_S=tile.n, BLOCK_D=constants["BLOCK_D"], num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def _prefill(call: _Call, out: Tensor) -> None:
    plan, chunks = call.plan, call.plan.chunks
    tile = CHUNK_TILES.tile(call.architecture, call.dtype, plan.layout.head_dim)
    group = out.shape[1] // (plan.layout.kv_heads * plan.layout.head_dim)
    block_m = max(tile.m, triton.next_power_of_2(group))
    rows = chunks.rows.numel()
    tiles = chunks.tokens // (block_m // group) + rows
    chunk_kernel[(tiles, plan.layout.kv_heads)](
        *call.tensors, out, plan.starts, plan.cu_query_lengths, plan.tables, chunks.rows, chunks.firsts,
        **call.numbers, chunks=rows, **call.constants, BLOCK_M=block_m, BLOCK_N=tile.n,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
