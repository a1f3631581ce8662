"""Subjects whose work goes row by row: norm, gates, matrix products, experts, page copies."""

from __future__ import annotations

import torch

from bench.kernels.subject import TOLERANCES, Call, Ground, Subject
from kernels.reference import copy_blocks as copy_reference
from kernels.reference import fused_moe as moe_reference
from kernels.reference import gelu_mul as gelu_reference
from kernels.reference import linear_quantized as quantized_reference
from kernels.reference import matmul_batch_invariant as matmul_reference
from kernels.reference import rms_norm as norm_reference
from kernels.reference import silu_mul as silu_reference
from kernels.reference.quantized_weight import PANEL, quantize_fp8, quantize_int4, quantize_int8
from kernels.triton import costs
from kernels.triton.copy_blocks import copy_blocks
from kernels.triton.fused_moe import fused_moe
from kernels.triton.gelu_mul import gelu_mul
from kernels.triton.linear_quantized import linear_quantized
from kernels.triton.matmul_batch_invariant import matmul_batch_invariant
from kernels.triton.rms_norm import rms_norm
from kernels.triton.silu_mul import silu_mul

EPSILON = 1e-5


def norm(tokens: int, hidden: int, dtype: torch.dtype, delta: bool = True) -> Subject:
    def build(ground: Ground) -> Call:
        stream = ground.normal(torch.float32, tokens, hidden)
        weight = ground.other(1).normal(dtype, hidden)
        added = ground.other(2).normal(dtype, tokens, hidden) if delta else None
        run = norm_reference.rms_norm if ground.exact else rms_norm
        return lambda: [run(stream, weight, EPSILON, added), stream]

    cost = costs.rms_norm(tokens, hidden, dtype.itemsize, delta)
    return Subject("rms_norm", f"T{tokens} H{hidden}{' + delta' if delta else ''}", dtype, build, cost, TOLERANCES[dtype])


def gate(kind: str, tokens: int, width: int, dtype: torch.dtype) -> Subject:
    """kind: silu_mul or gelu_mul."""
    ours, right = {"silu_mul": (silu_mul, silu_reference.silu_mul), "gelu_mul": (gelu_mul, gelu_reference.gelu_mul)}[kind]

    def build(ground: Ground) -> Call:
        gate_up = ground.normal(dtype, tokens, 2 * width)
        run = right if ground.exact else ours
        return lambda: [run(gate_up)]

    return Subject(kind, f"T{tokens} I{width}", dtype, build, costs.gate(tokens, width, dtype.itemsize), TOLERANCES[dtype])


def matmul(rows: int, columns: int, depth: int, dtype: torch.dtype) -> Subject:
    def build(ground: Ground) -> Call:
        x, weight = ground.normal(dtype, rows, depth), ground.other(1).normal(dtype, columns, depth, scale=depth**-0.5)
        run = matmul_reference.matmul_batch_invariant if ground.exact else matmul_batch_invariant
        return lambda: [run(x, weight, None)]

    cost = costs.matmul(rows, columns, depth, dtype.itemsize)
    shape = f"M{rows} N{columns} K{depth}"
    return Subject("matmul_batch_invariant", shape, dtype, build, cost, TOLERANCES[dtype], wide_matrix=dtype.itemsize == 2)


def copies(pairs: int, layers: int, page_elements: int, dtype: torch.dtype) -> Subject:
    def build(ground: Ground) -> Call:
        pool = ground.normal(dtype, layers, 2 * pairs, page_elements)
        told = [(2 * pair, 2 * pair + 1) for pair in range(pairs)]
        run = copy_reference.copy_blocks if ground.exact else copy_blocks

        def call() -> list[torch.Tensor]:
            run(pool, told)
            return [pool]

        return call

    cost = costs.copy_blocks(pairs, layers, page_elements * dtype.itemsize)
    return Subject("copy_blocks", f"{pairs} pages × {layers} layers × {page_elements}", dtype, build, cost, 0.0)


def quantized(form: str, rows: int, columns: int, depth: int, dtype: torch.dtype) -> Subject:
    """form: int8, fp8 or int4."""
    quantize = {"int8": quantize_int8, "fp8": quantize_fp8, "int4": quantize_int4}[form]
    weight_bytes = quantize(torch.zeros(PANEL, depth)).nbytes * -(-columns // PANEL)

    def build(ground: Ground) -> Call:
        x = ground.normal(dtype, rows, depth)
        exact = ground.other(1).normal(torch.float32, columns, depth, scale=depth**-0.5).float()
        weight = quantize(exact)
        run = quantized_reference.linear_quantized if ground.exact else linear_quantized
        return lambda: [run(x, weight, None)]

    cost = costs.linear_quantized(rows, columns, depth, dtype.itemsize, weight_bytes)
    return Subject("linear_quantized", f"{form} M{rows} N{columns} K{depth}", dtype, build, cost, TOLERANCES[dtype])


def experts(tokens: int, count: int, top_k: int, hidden: int, width: int, dtype: torch.dtype) -> Subject:
    def build(ground: Ground) -> Call:
        x, logits = ground.normal(dtype, tokens, hidden), ground.other(1).normal(torch.float32, tokens, count)
        gate_up = ground.other(2).normal(dtype, count, 2 * width, hidden, scale=hidden**-0.5)
        down = ground.other(3).normal(dtype, count, hidden, width, scale=width**-0.5)
        run = moe_reference.fused_moe if ground.exact else fused_moe
        return lambda: [run(x, logits, gate_up, down, top_k)]

    cost = costs.fused_moe(tokens, min(count, tokens * top_k), top_k, hidden, width, dtype.itemsize)
    shape = f"T{tokens} E{count} top-{top_k} H{hidden} I{width}"
    return Subject("fused_moe", shape, dtype, build, cost, 2 * TOLERANCES[dtype], wide_matrix=False)
