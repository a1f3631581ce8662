"""The n likeliest tokens of every row, as log probabilities of its logits: the largest first, of equals the first.

Each chunk of a row finds its own n; a program a row joins them. Bytes: V · s a row, s the bytes of a logit, and 8 · n a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.sampling_draw import LEAST_LOGPROB

NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def largest_of(values, tokens, free):
    """The largest of the free values, the least token of equals: (value, token, where). Nothing free: -inf and NO_TOKEN."""
    value = tl.max(tl.where(free, values, float("-inf")), axis=0)
    token = tl.min(tl.where(free & (values == value), tokens, NO_TOKEN), axis=0)
    return value, token


@triton.jit
def top_parts_kernel(values_out, tokens_out, logits, vocab, n, CHUNK: tl.constexpr):
    """Grid: (R, chunks). values_out and tokens_out [R, chunks, n]."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    free = token < vocab
    values = tl.load(logits + row * vocab + token, mask=free, other=float("-inf")).to(tl.float32)
    slot = (row * tl.num_programs(1) + tl.program_id(1)) * n
    for index in range(n):
        value, best = largest_of(values, token, free)
        tl.store(values_out + slot + index, value)
        tl.store(tokens_out + slot + index, best)
        free = free & (token != best)


@triton.jit
def top_join_kernel(logprobs, top_tokens, values_in, tokens_in, normalizers, parts, n, PARTS: tl.constexpr):
    """Grid: (R,). Of a row's `parts` = chunks · n entries the n best. A row with NaN gets ids inside V, and no more."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PARTS)
    values = tl.load(values_in + row * parts + at, mask=at < parts, other=float("-inf"))
    tokens = tl.load(tokens_in + row * parts + at, mask=at < parts, other=NO_TOKEN)
    free = tokens != NO_TOKEN
    normalizer = tl.load(normalizers + row)
    for index in range(n):
        value, best = largest_of(values, tokens, free)
        logprob = value - normalizer
        tl.store(logprobs + row * n + index, tl.where(logprob > LEAST_LOGPROB, logprob, LEAST_LOGPROB))
        tl.store(top_tokens + row * n + index, tl.where(best == NO_TOKEN, 0, best).to(tl.int64))
        free = free & (tokens != best)
