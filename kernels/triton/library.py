"""The Triton kernels as operators of torch, torch.ops.rantang.*: one name each, whatever the device, that torch can trace.

Registered by Library.define and impl, whose dispatch costs a call about a microsecond, where the custom_op decorator costs eight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.reference.quantized_weight import QuantizedWeight
from kernels.reference.rope_kv_write import HeadNorms
from kernels.reference.sampling import SamplingRows, TokenLists
from kernels.triton import copy_blocks as copy_file
from kernels.triton import fused_moe as moe_file
from kernels.triton import gelu_mul as gelu_file
from kernels.triton import linear_quantized as quantized_file
from kernels.triton import matmul_batch_invariant as matmul_file
from kernels.triton import paged_attention as attention_file
from kernels.triton import rms_norm as norm_file
from kernels.triton import rope_kv_write as rope_file
from kernels.triton import sampling as sampling_file
from kernels.triton import silu_mul as silu_file
from kernels.triton.plan_values import from_values

NAMESPACE = "rantang"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
DEVICES = ("CUDA", "CPU")  # a ROCm device is "CUDA" to torch; on a CPU kernels are interpreted, or refuse


def _operator(schema: str, real: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Defines an operator; `fake` says what comes out without computing it."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    for device in DEVICES:
        LIBRARY.impl(name, real, device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _rope(
    qkv: Tensor,
    angles: Sequence[Tensor],
    cache: Tensor,
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    norms: Sequence[Tensor],
    epsilon: float,
    cache_scales: Tensor | None,
) -> Tensor:
    head_norms = HeadNorms(norms[0], norms[1], epsilon) if norms else None
    return rope_file.rope_kv_write(qkv, angles[0], angles[1], cache, from_values(tensors, numbers), head_norms, cache_scales)


def _rope_fake(
    qkv: Tensor,
    angles: Sequence[Tensor],
    cache: Tensor,
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    norms: Sequence[Tensor],
    epsilon: float,
    cache_scales: Tensor | None,
) -> Tensor:
    kv_heads, _, head_dim = numbers[:3]
    return qkv.new_empty((qkv.shape[0], qkv.shape[1] - 2 * kv_heads * head_dim))


def _attention(
    queries: Tensor,
    cache: Tensor,
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    scale: float,
    soft_cap: float | None,
    cache_scales: Tensor | None,
) -> Tensor:
    return attention_file.paged_attention(queries, cache, from_values(tensors, numbers), scale, soft_cap, cache_scales)


def _copy(pool: Tensor, pairs: Sequence[int]) -> None:
    copy_file.copy_blocks(pool, list(zip(pairs[::2], pairs[1::2], strict=True)))


def _linear(
    x: Tensor, form: str, sizes: Sequence[int], values: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    return quantized_file.linear_quantized(x, QuantizedWeight(form, sizes[0], sizes[1], values, scales, minima), bias)


def _sampling(
    logits: Tensor,
    numbers: Tensor,
    counts: Tensor,
    masks: Sequence[Tensor | None],
    bias: Sequence[Tensor],
    banned: Sequence[Tensor],
    top_logprobs: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    biases, bans = (TokenLists(*each) if each else None for each in (bias, banned))
    allowed, prompt_seen, output_counts = masks
    rows = SamplingRows(numbers, counts, allowed, prompt_seen, output_counts, biases, bans)
    done = sampling_file.sampling(logits, rows, top_logprobs)
    return done.tokens, done.statuses, done.logprobs, done.top_tokens, done.top_logprobs


def _sampling_fake(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, top = logits.shape[0], rest[-1]

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return logits.new_empty(shape, dtype=dtype)

    return (
        empty(rows, dtype=torch.int64),
        empty(rows, dtype=torch.int32),
        empty(rows, dtype=torch.float32),
        empty(rows, top, dtype=torch.int64),
        empty(rows, top, dtype=torch.float32),
    )


def _half(gate_up: Tensor, approximate: str = "") -> Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


rms_norm = _operator(
    "rms_norm(Tensor(a!) residual, Tensor weight, float epsilon, Tensor? delta=None) -> Tensor",
    norm_file.rms_norm,
    lambda residual, weight, epsilon, delta=None: residual.new_empty(residual.shape, dtype=weight.dtype),
)
silu_mul = _operator("silu_mul(Tensor gate_up) -> Tensor", silu_file.silu_mul, _half)
gelu_mul = _operator('gelu_mul(Tensor gate_up, str approximate="tanh") -> Tensor', gelu_file.gelu_mul, _half)
matmul_batch_invariant = _operator(
    "matmul_batch_invariant(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    matmul_file.matmul_batch_invariant,
    lambda x, weight, bias=None: x.new_empty((x.shape[0], weight.shape[0])),
)
rope_kv_write = _operator(
    "rope_kv_write(Tensor qkv, Tensor[] angles, Tensor(a!) cache, Tensor[] plan, int[] shape, Tensor[] norms, float epsilon,"
    " Tensor(b!)? cache_scales) -> Tensor",
    _rope,
    _rope_fake,
)
paged_attention = _operator(
    "paged_attention(Tensor queries, Tensor cache, Tensor[] plan, int[] shape, float scale, float? soft_cap, Tensor? cache_scales)"
    " -> Tensor",
    _attention,
    lambda queries, *rest: torch.empty_like(queries, memory_format=torch.contiguous_format),
)
copy_blocks = _operator("copy_blocks(Tensor(a!) pool, int[] pairs) -> ()", _copy, lambda pool, pairs: None)
linear_quantized = _operator(
    "linear_quantized(Tensor x, str form, int[] sizes, Tensor values, Tensor scales, Tensor? minima, Tensor? bias=None) -> Tensor",
    _linear,
    lambda x, form, sizes, *rest: x.new_empty((x.shape[0], sizes[0])),
)
fused_moe = _operator(
    "fused_moe(Tensor hidden, Tensor router_logits, Tensor gate_up, Tensor down, int top_k, bool renormalize=True) -> Tensor",
    moe_file.fused_moe,
    lambda hidden, *rest: torch.empty_like(hidden),
)
sampling = _operator(
    "sampling(Tensor logits, Tensor numbers, Tensor counts, Tensor?[] masks, Tensor[] bias, Tensor[] banned, int top_logprobs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _sampling,
    _sampling_fake,
)
