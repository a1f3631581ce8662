"""top-k and top-p of the sampler, exact and without a sort of the row.

1. A histogram of the scaled logits in 256 bins of 1/8, and the row's mass, in integers of 2^-40: whatever order they are added in,
   the sum is the same. The bins say up to which one the threshold can lie (top-k by counts; top-p because what the bins behind it
   can hold at most is less than 1 - top_p of the mass).
2. The tokens of these bins, usually a few hundred, are gathered.
3. Among them the threshold is found bit by bit: scaled ≤ 0, so the bits of |scaled| are in order, and "how many (how much mass) have
   at most these bits" is asked 31 times. Then the draw. A row so flat that all its tokens are candidates takes longer, and is as exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.sampling_draw import (
    COUNTS,
    NUMBERS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    draw_of,
    floor_of,
    is_drawn,
    is_filtered,
    noise_bits,
    scaled_logits,
    stream_key,
)

BINS_PER_NAT = tl.constexpr(8)
LARGEST_KEY = tl.constexpr(0x7F7FFFFF)  # the bits of the largest finite float32
MARGIN = tl.constexpr(1.001)  # more than exp in float32 can be wrong by
MASS_UNITS = tl.constexpr(float(1 << 40))


@triton.jit
def mass_of(values):
    """exp(values) in units of 2^-40, int64; values ≤ 0. 2^18 of them fit."""
    return (tl.exp(values) * MASS_UNITS).to(tl.int64)


@triton.jit
def key_of(values):
    """Bits that ascend as values ≤ 0 descend."""
    return tl.abs(values).to(tl.int32, bitcast=True)


@triton.jit
def bin_of(values, BINS: tl.constexpr):
    return tl.minimum(tl.abs(values) * BINS_PER_NAT, BINS - 1.0).to(tl.int32)


@triton.jit
def kept_values(work, bests, numbers, row, vocab, token):
    """Scaled logits, and which of them min-p keeps."""
    inside = token < vocab
    temperature = tl.load(numbers + row * NUMBERS + TEMPERATURE).to(tl.float32)
    values = scaled_logits(work + row * vocab, tl.load(bests + row), temperature, token, inside)
    return values, inside & (values >= floor_of(numbers + row * NUMBERS)) & (values > float("-inf"))


@triton.jit
def histogram_kernel(histogram, sums, work, statuses, bests, numbers, counts, vocab, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """Grid: (R, chunks)."""
    row = tl.program_id(0).to(tl.int64)
    if is_drawn(statuses, numbers, row):
        if is_filtered(numbers, counts, row, vocab):
            values, kept = kept_values(work, bests, numbers, row, vocab, tl.program_id(1) * CHUNK + tl.arange(0, CHUNK))
            values = tl.where(kept, values, 0.0)
            counted = tl.histogram(bin_of(values, BINS), BINS, mask=kept)
            tl.atomic_add(histogram + row * BINS + tl.arange(0, BINS), counted, mask=counted > 0, sem="relaxed")
            tl.atomic_add(sums + row * 2, tl.sum(tl.where(kept, mass_of(values), 0), axis=0), sem="relaxed")


@triton.jit
def last_bin(histogram, mass, top_k, top_p, vocab, BINS: tl.constexpr):
    """The first bin up to which the threshold surely lies."""
    place = tl.arange(0, BINS)
    counted = tl.load(histogram + place).to(tl.int64)
    last = tl.sum((tl.cumsum(counted, axis=0) < top_k).to(tl.int32), axis=0)
    if (top_k <= 0) | (top_k >= vocab):
        most = counted.to(tl.float64) * tl.exp(place.to(tl.float64) * (-1.0 / BINS_PER_NAT))
        behind = tl.sum(most, axis=0) - tl.cumsum(most, axis=0)
        last = tl.sum((behind * (MASS_UNITS * MARGIN) > (1.0 - top_p) * mass.to(tl.float64)).to(tl.int32), axis=0)
    return tl.minimum(last, BINS - 1)


@triton.jit
def gather_kernel(
    candidates, candidate_tokens, histogram, sums, work, statuses, bests, numbers, counts, vocab, BINS: tl.constexpr, CHUNK: tl.constexpr
):
    """Grid: (R, chunks). The order of candidates [R, V] is that in which programs come by; nothing that follows depends on it."""
    row = tl.program_id(0).to(tl.int64)
    if is_drawn(statuses, numbers, row):
        if is_filtered(numbers, counts, row, vocab):
            token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
            values, kept = kept_values(work, bests, numbers, row, vocab, token)
            top_k, top_p = tl.load(counts + row * COUNTS + TOP_K), tl.load(numbers + row * NUMBERS + TOP_P)
            last = last_bin(histogram + row * BINS, tl.load(sums + row * 2), top_k, top_p, vocab, BINS)
            taken = (kept & (bin_of(tl.where(kept, values, 0.0), BINS) <= last)).to(tl.int32)
            count = tl.sum(taken, axis=0)
            if count > 0:
                first = tl.atomic_add(sums + row * 2 + 1, count.to(tl.int64), sem="relaxed")
                at = row * vocab + first + tl.cumsum(taken, axis=0) - 1
                tl.store(candidates + at, values, mask=taken > 0)
                tl.store(candidate_tokens + at, token, mask=taken > 0)


@triton.jit
def weight_up_to(candidates, size, key, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """How many candidates have keys ≤ `key`, or what mass; int64."""
    total = size * 0
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(candidates + at, mask=at < size, other=float("-inf"))
        weights = mass_of(values) if BY_MASS else (at < size).to(tl.int64)
        total += tl.sum(tl.where(key_of(values) <= key, weights, 0), axis=0)
    return total


@triton.jit
def least_key(candidates, size, high, wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The least key ≤ high whose weight reaches `wanted`; high where none below it does."""
    low = high * 0
    while low < high:
        middle = low + (high - low) // 2
        if weight_up_to(candidates, size, middle, BY_MASS, BLOCK) >= wanted:
            high = middle
        else:
            low = middle + 1
    return high


@triton.jit
def threshold_key(candidates, size, mass, top_k, top_p, vocab, BLOCK: tl.constexpr):
    """The key of the last candidate that stays."""
    key = (size * 0 + LARGEST_KEY).to(tl.int32)
    total = mass
    if (top_k > 0) & (top_k < vocab) & (top_k <= size):
        key = least_key(candidates, size, key, top_k, False, BLOCK)
        above = weight_up_to(candidates, size, key - 1, False, BLOCK)
        at_key = mass_of(-key.to(tl.float32, bitcast=True))
        total = weight_up_to(candidates, size, key - 1, True, BLOCK) + (top_k - above) * at_key
    if top_p < 1.0:
        wanted = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
        key = least_key(candidates, size, key, wanted, True, BLOCK)
    return key


@triton.jit
def choose_kernel(drawn, drawn_tokens, candidates, candidate_tokens, sums, statuses, numbers, counts, chunks, vocab, BLOCK: tl.constexpr):
    """Grid: (R,). The threshold among a filtered row's candidates, and the draw; into the place of the row's first chunk."""
    row = tl.program_id(0).to(tl.int64)
    if is_drawn(statuses, numbers, row):
        if is_filtered(numbers, counts, row, vocab):
            size = tl.load(sums + row * 2 + 1)
            top_k, top_p = tl.load(counts + row * COUNTS + TOP_K), tl.load(numbers + row * NUMBERS + TOP_P)
            last = threshold_key(candidates + row * vocab, size, tl.load(sums + row * 2), top_k, top_p, vocab, BLOCK)
            reached = top_p * 0 - float("inf")
            chosen = last * 0 + 0x7FFFFFFF
            for start in range(0, size, BLOCK):
                at = start + tl.arange(0, BLOCK)
                values = tl.load(candidates + row * vocab + at, mask=at < size, other=float("-inf"))
                token = tl.load(candidate_tokens + row * vocab + at, mask=at < size, other=0)
                kept = (at < size) & (key_of(values) <= last)
                bits = noise_bits(stream_key(counts + row * COUNTS, token), token)
                total, drawn_token = draw_of(tl.where(kept, values, 0.0), token, kept, bits)
                better = (total > reached) | ((total == reached) & (drawn_token < chosen))
                reached = tl.where(better, total, reached)
                chosen = tl.where(better, drawn_token, chosen)
            tl.store(drawn + row * chunks, reached)
            tl.store(drawn_tokens + row * chunks, chosen)
