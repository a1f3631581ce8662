"""Kernels to test the gates with: one that is right, and its siblings that are wrong in one way each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64


@triton.jit
def scale_kernel(x_ptr, out_ptr, count, factor, BLOCK: tl.constexpr, EXTRA: tl.constexpr):
    """out = x · factor; with EXTRA > 0 that many elements more are read than there are."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < count + EXTRA, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (x * factor).to(out_ptr.dtype.element_ty), mask=place < count)


@triton.jit
def page_sum_kernel(cache_ptr, table_ptr, out_ptr, length, PAGE: tl.constexpr, LAST: tl.constexpr):
    """out = Σ of the first `length` elements, laid in pages; without LAST what does not fill a page is forgotten."""
    total = 0.0
    lane = tl.arange(0, PAGE)
    pages = tl.cdiv(length, PAGE) if LAST else length // PAGE
    for index in range(pages):
        page = tl.load(table_ptr + index).to(tl.int64)
        place = index * PAGE + lane
        total += tl.sum(tl.load(cache_ptr + page * PAGE + lane, mask=place < length, other=0.0), 0)
    tl.store(out_ptr, total)


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """out [M, N] = a [M, K] · b [K, N]."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b, input_precision="ieee"))


@triton.jit
def careless_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Arithmetic on what it loads, as it is."""
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place)
    tl.store(out_ptr + place, x + x)


@triton.jit
def spilling_kernel(x_ptr, out_ptr, N: tl.constexpr):
    """out = x · xᵀ, with more of it at a time than one warp has registers for."""
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n[:, None] * N + n[None, :])
    total = tl.dot(x, tl.trans(x))
    total = tl.dot(total.to(x.dtype), x) + total
    tl.store(out_ptr + n[:, None] * N + n[None, :], total)


def scale(x: Tensor, factor: float, extra: int = 0, out_dtype: torch.dtype | None = None) -> Tensor:
    out = torch.full_like(x, float("nan"), dtype=out_dtype or x.dtype)
    scale_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), factor, BLOCK, extra)
    return out


def page_sum(cache: Tensor, table: Tensor, length: int, last: bool = True) -> Tensor:
    out = torch.full((1,), float("nan"))
    page_sum_kernel[(1,)](cache, table, out, length, cache.shape[1], last)
    return out
