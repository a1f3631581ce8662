"""Which kernels and shapes are compiled ahead of time, checked and measured. Shapes are a Llama-8B's where nothing else is said."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.kernels.attention_subjects import Rows, attention, rope
from bench.kernels.row_subjects import copies, experts, gate, matmul, norm, quantized
from bench.kernels.sampling_subjects import DRAWN, EVERYTHING, FILTERED, GREEDY, sampler
from bench.kernels.subject import Subject

HIDDEN, WIDTH, VOCAB = 4096, 14336, 128_256
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DECODE = ((70, 1), (600, 1), (15, 1))  # a row of one split, one of several
CHUNK = ((33, 40), (0, 5))


def ahead_of_time(dtypes: tuple[torch.dtype, ...] = (BF16, FP32), *, forms: bool = True) -> Iterator[Subject]:
    """At least one for every row of every tile table, small: what is compiled depends on sizes of the model, not of the batch."""
    for dtype in dtypes:
        for hidden in (512, 4096, 8192, 16384):
            yield norm(2, hidden, dtype)
        yield norm(2, 4096, dtype, delta=False)
        yield gate("silu_mul", 2, 512, dtype)
        yield gate("gelu_mul", 2, 512, dtype)
        yield matmul(16, 512, 512, dtype)
        for form in ("int8", "fp8", "int4"):
            yield quantized(form, 2, 256, 2048, dtype)
        yield experts(5, 4, 2, 256, 512, dtype)
        for dim in (64, 128, 256):
            yield attention(Rows(DECODE, dim=dim), dtype)
            yield attention(Rows(CHUNK, dim=dim), dtype)
            yield rope(Rows(CHUNK, dim=dim), dtype, norms=dim == 128)
        yield attention(Rows((*DECODE, *CHUNK), window=128, soft_cap=30.0), dtype)
        for form in ("int8", "fp8") if forms else ():
            yield attention(Rows((*DECODE, *CHUNK), form=form), dtype)
            yield rope(Rows(CHUNK, form=form), dtype)
    yield copies(2, 2, 512, BF16)
    for asking in (GREEDY, EVERYTHING):
        yield sampler(2, 8192, asking)


def quick(architecture: str) -> Iterator[Subject]:
    """The part of ahead_of_time that is compiled at every run of the tests: the widest on sm_90, the heart elsewhere; bfloat16."""
    yield matmul(16, 512, 512, BF16)
    yield attention(Rows(DECODE, dim=128), BF16)
    yield attention(Rows(CHUNK, dim=128), BF16)
    yield rope(Rows(CHUNK, dim=128), BF16, norms=True)
    if architecture == "sm_90":
        yield norm(2, 4096, BF16)
        yield gate("silu_mul", 2, 512, BF16)
        yield gate("gelu_mul", 2, 512, BF16)
        yield attention(Rows(CHUNK, dim=256), BF16)
        yield attention(Rows((*DECODE, *CHUNK), window=128, soft_cap=30.0), BF16)
        yield attention(Rows((*DECODE, *CHUNK), form="fp8"), BF16)
        yield copies(2, 2, 512, BF16)
        yield quantized("int4", 2, 256, 2048, BF16)
        yield experts(5, 4, 2, 256, 512, BF16)
        yield sampler(2, 8192, EVERYTHING)


def to_check(dtypes: tuple[torch.dtype, ...] = (BF16, FP16, FP32)) -> Iterator[Subject]:
    """Compiled kernels against float64, on shapes that are ugly: odd lengths, groups, mixed batches, far from full tiles."""
    for dtype in dtypes:
        for hidden in (48, 576, 4096, 16384):
            yield norm(7, hidden, dtype)
        yield norm(3, 4096, dtype, delta=False)
        for kind in ("silu_mul", "gelu_mul"):
            yield gate(kind, 7, 1537, dtype)
        for rows in (1, 7, 130):
            yield matmul(rows, 200, 1096, dtype)
            for form in ("int8", "fp8", "int4"):
                yield quantized(form, rows, 200, 1096, dtype)
            yield experts(rows, 5, 2, 72, 200, dtype)
        mixed = ((0, 1), (15, 1), (16, 1), (17, 1), (1327, 1), (13, 5), (334, 129), (0, 300))
        for heads, kv_heads, dim in ((32, 8, 128), (9, 3, 64), (28, 4, 128), (4, 4, 80), (8, 1, 256)):
            yield attention(Rows(mixed, heads, kv_heads, dim), dtype)
            yield rope(Rows(mixed, heads, kv_heads, dim), dtype, norms=True)
        yield attention(Rows(mixed, window=100), dtype)
        yield attention(Rows(mixed, soft_cap=30.0), dtype)
        for form in ("int8", "fp8"):
            yield attention(Rows(mixed, form=form), dtype)
            yield rope(Rows(mixed, form=form), dtype)
        yield copies(5, 3, 2056, dtype)
    for asking in (GREEDY, DRAWN, FILTERED, EVERYTHING):
        yield sampler(33, 50_257, asking)


def to_measure() -> Iterator[Subject]:
    """bfloat16, the shapes of the targets and around them."""
    for tokens in (1, 32, 256, 2048, 8192):
        yield norm(tokens, HIDDEN, BF16)
        yield gate("silu_mul", tokens, WIDTH, BF16)
        yield rope(Rows(((512, tokens),)), BF16)
        yield matmul(tokens, HIDDEN, HIDDEN, BF16)
    for batch, context in ((1, 4096), (8, 4096), (32, 2048), (64, 4096), (256, 1024)):
        yield attention(Rows(((context - 1, 1),) * batch), BF16)
    for form in ("int8", "fp8"):
        yield attention(Rows(((4095, 1),) * 64, form=form), BF16)
    for rows in (((0, 2048),), ((0, 8192),), ((6144, 2048),), ((0, 512),) * 16, ((4096, 512), *((2047, 1),) * 64)):
        yield attention(Rows(rows), BF16)
    for tokens in (1, 8, 32):
        for form in ("int8", "fp8", "int4"):
            yield quantized(form, tokens, HIDDEN, HIDDEN, BF16)
        yield experts(tokens, 8, 2, HIDDEN, WIDTH, BF16)
    yield copies(16, 32, 2 * 8 * 16 * 128, BF16)
    for asking in (GREEDY, DRAWN, FILTERED, EVERYTHING):
        yield sampler(64, VOCAB, asking)
