"""The Triton kernels under the names and signatures that models call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from kernels.batch import CacheLayout, ModelSizes, PagedBatch
from kernels.errors import KernelError
from kernels.reference.quantized_weight import QuantizedWeight
from kernels.reference.rope_kv_write import HeadNorms
from kernels.reference.sampling import Sampled, SamplingRows, TokenLists
from kernels.triton import library, matmul_batch_invariant, rms_norm, rope_kv_write, silu_mul
from kernels.triton.attention_plan import plan_attention
from kernels.triton.attention_tiles import CHUNK_TILES, REDUCE_TILES, SPLIT_TILES
from kernels.triton.fused_moe import DOWN_TILES as MOE_DOWN_TILES
from kernels.triton.fused_moe import TILES as MOE_TILES
from kernels.triton.linear_quantized import TILES as QUANTIZED_TILES
from kernels.triton.moe_routing import EXPERTS_MAX
from kernels.triton.plan_values import PlanValues, to_values
from kernels.triton.tiles import architecture_of, interpreted


def title(device: torch.device) -> str:
    """What serves, for people. Raises KernelError for a device that runs no Triton kernels."""
    how = " in the interpreter" if interpreted() else ""
    return f"Triton {triton.__version__} kernels for {architecture_of(device)}{how}"


def check(device: torch.device, sizes: ModelSizes) -> None:
    """Raises KernelError, with what would work, where a kernel of the forward pass has no tile for this model on this device."""
    architecture = architecture_of(device)
    asked = [(rms_norm.TILES, sizes.hidden)]
    asked += [(table, sizes.head_dim) for table in (rope_kv_write.TILES, SPLIT_TILES, REDUCE_TILES, CHUNK_TILES)]
    asked += [(MOE_TILES, sizes.width), (MOE_DOWN_TILES, sizes.hidden)] if sizes.experts else [(silu_mul.TILES, sizes.width)]
    asked += [(QUANTIZED_TILES, sizes.hidden)] if sizes.quantized else []
    asked += [(matmul_batch_invariant.TILES, sizes.hidden)] if sizes.batch_invariant else []
    for table, size in asked:
        table.tile(architecture, sizes.dtype, size)
    if sizes.experts > EXPERTS_MAX:
        raise KernelError(f"fused_moe: {sizes.experts} experts, at most {EXPERTS_MAX}; RANTANG_KERNELS=reference computes with torch")


def plan(batch: PagedBatch, layout: CacheLayout, dtype: torch.dtype, device: torch.device, window: int | None = None) -> PlanValues:
    return to_values(plan_attention(batch, layout, dtype, device, window))


def rope(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    cache: Tensor,
    plan: PlanValues,
    norms: HeadNorms | None = None,
    cache_scales: Tensor | None = None,
) -> Tensor:
    factors, epsilon = ([cosine, sine], 0.0) if norms is None else ([cosine, sine, norms.query, norms.key], norms.epsilon)
    queries: Tensor = library.rope_kv_write(qkv, factors, cache, plan.tensors, plan.numbers, epsilon, cache_scales)
    return queries


def attention(
    queries: Tensor, cache: Tensor, plan: PlanValues, scale: float, soft_cap: float | None = None, cache_scales: Tensor | None = None
) -> Tensor:
    out: Tensor = library.paged_attention(queries, cache, plan.tensors, plan.numbers, scale, soft_cap, cache_scales)
    return out


def copy_blocks(pool: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    if pairs:
        library.copy_blocks(pool, [page for pair in pairs for page in pair])


def linear_quantized(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    sizes = [weight.rows, weight.columns]
    out: Tensor = library.linear_quantized(x, weight.form, sizes, weight.values, weight.scales, weight.minima, bias)
    return out


def sampling(logits: Tensor, rows: SamplingRows, top_logprobs: int = 0) -> Sampled:
    masks = [rows.allowed, rows.prompt_seen, rows.output_counts]
    done = library.sampling(logits, rows.numbers, rows.counts, masks, _flat(rows.bias), _flat(rows.banned), top_logprobs)
    return Sampled(*done)


def _flat(lists: TokenLists | None) -> list[Tensor]:
    return [] if lists is None else [lists.starts, lists.tokens, lists.values]
