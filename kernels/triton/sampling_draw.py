"""The sampler's randomness and the draw over a whole row.

A draw is the largest of scaled + noise. noise(u) = -log(-log u) needs float64 where u is near 1, and is bounded from above by
-log(1 - u), whose argument float32 holds exactly enough: so every token gets the bound in float32, and float64 is spent on the
few whose bound reaches what the best of them really has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.reference.noise import MULTIPLIERS, WEYL
from kernels.reference.sampling import GREEDY_BELOW, IMPOSSIBLE, Count, Number

CHOICE = tl.constexpr(int(Count.CHOICE))
COUNTS = tl.constexpr(len(Count))
FIRST_MULTIPLIER = tl.constexpr(MULTIPLIERS[0])
GREEDY = tl.constexpr(GREEDY_BELOW)
INCREMENT = tl.constexpr(WEYL)
LEAST_LOGPROB = tl.constexpr(IMPOSSIBLE)
MIN_P = tl.constexpr(int(Number.MIN_P))
NUMBERS = tl.constexpr(len(Number))
POSITION = tl.constexpr(int(Count.POSITION))
SECOND_MULTIPLIER = tl.constexpr(MULTIPLIERS[1])
SEED = tl.constexpr(int(Count.SEED))
SLACK = tl.constexpr(1e-3)  # more than float32 can be wrong by, for sums that can win
TEMPERATURE = tl.constexpr(int(Number.TEMPERATURE))
TOP_K = tl.constexpr(int(Count.TOP_K))
TOP_P = tl.constexpr(int(Number.TOP_P))
UNIT = tl.constexpr(2.0**-32)


@triton.jit
def mixed(state):
    """splitmix64's finish; state uint64."""
    state = (state ^ (state >> 30)) * FIRST_MULTIPLIER
    state = (state ^ (state >> 27)) * SECOND_MULTIPLIER
    return state ^ (state >> 31)


@triton.jit
def stream_key(counts, lane):
    """noise.stream_key of a row's `counts`, once for each lane."""
    state = mixed((tl.load(counts + SEED) + lane * 0).to(tl.uint64) + INCREMENT)
    state = mixed((state ^ (tl.load(counts + CHOICE) + lane * 0).to(tl.uint64)) + INCREMENT)
    return mixed((state ^ (tl.load(counts + POSITION) + lane * 0).to(tl.uint64)) + INCREMENT)


@triton.jit
def noise_bits(keys, tokens):
    """noise.noise_bits: 32 random bits, in uint64."""
    return mixed((tokens.to(tl.uint64) + 1) * INCREMENT + keys) >> 32


@triton.jit
def scaled_logits(work, best, temperature, token, inside):
    """(logit - best) / temperature as the sampler on the CPU rounds it."""
    x = tl.load(work + token, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x - best, temperature)


@triton.jit
def floor_of(numbers):
    """min-p as the least scaled logit; -inf where it is off."""
    min_p = tl.load(numbers + MIN_P)
    return tl.where(min_p > 0.0, tl.minimum(tl.log(tl.where(min_p > 0.0, min_p, 1.0)), 0.0), float("-inf")).to(tl.float32)


@triton.jit
def is_drawn(statuses, numbers, row):
    return (tl.load(statuses + row) == 0) & (tl.load(numbers + row * NUMBERS + TEMPERATURE) >= GREEDY)


@triton.jit
def is_filtered(numbers, counts, row, vocab):
    """Whether top-k or top-p asks for an order; min-p alone does not."""
    top_k = tl.load(counts + row * COUNTS + TOP_K)
    return ((top_k > 0) & (top_k < vocab)) | (tl.load(numbers + row * NUMBERS + TOP_P) < 1.0)


@triton.jit
def draw_of(values, tokens, kept, bits):
    """The largest values + noise among `kept`, in float64, and its token; of equals the least token. -inf where none is kept."""
    lane = tl.arange(0, values.shape[0])
    rest = ((0xFFFFFFFF - bits.to(tl.int64)).to(tl.float32) + 0.5) * UNIT
    bound = tl.where(kept, values - tl.log(rest), float("-inf"))
    reached = tl.max(tl.where(kept, float("-inf"), float("-inf")).to(tl.float64), axis=0)
    chosen = tl.max(tl.where(kept, 0x7FFFFFFF, 0x7FFFFFFF), axis=0)
    top, place = tl.max(bound, axis=0, return_indices=True)
    while (top > float("-inf")) & (top.to(tl.float64) >= reached - SLACK):
        here = lane == place
        value = tl.sum(tl.where(here, values, 0.0), axis=0).to(tl.float64)
        token = tl.sum(tl.where(here, tokens, 0), axis=0)
        unit = (tl.sum(tl.where(here, bits.to(tl.int64), 0), axis=0).to(tl.float64) + 0.5) * UNIT
        total = value - tl.log(-tl.log(unit))
        better = (total > reached) | ((total == reached) & (token < chosen))
        reached = tl.where(better, total, reached)
        chosen = tl.where(better, token, chosen)
        bound = tl.where(here, float("-inf"), bound)
        top, place = tl.max(bound, axis=0, return_indices=True)
    return reached, chosen


@triton.jit
def draw_kernel(drawn, drawn_tokens, work, statuses, bests, numbers, counts, vocab, CHUNK: tl.constexpr):
    """Grid: (R, chunks). For rows without top-k and top-p: each chunk's best, drawn [R, chunks] float64 and its token."""
    row = tl.program_id(0).to(tl.int64)
    if is_drawn(statuses, numbers, row):
        if not is_filtered(numbers, counts, row, vocab):
            token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
            inside = token < vocab
            temperature = tl.load(numbers + row * NUMBERS + TEMPERATURE).to(tl.float32)
            values = scaled_logits(work + row * vocab, tl.load(bests + row), temperature, token, inside)
            kept = inside & (values >= floor_of(numbers + row * NUMBERS)) & (values > float("-inf"))
            total, chosen = draw_of(values, token, kept, noise_bits(stream_key(counts + row * COUNTS, token), token))
            slot = row * tl.num_programs(1) + tl.program_id(1)
            tl.store(drawn + slot, total)
            tl.store(drawn_tokens + slot, chosen)


@triton.jit
def finish_kernel(
    tokens,
    logprobs,
    logits,
    statuses,
    best_tokens,
    normalizers,
    drawn,
    drawn_tokens,
    numbers,
    counts,
    chunks,
    vocab,
    CHUNKS: tl.constexpr,
):
    """Grid: (R,). The row's token: its best, or the best of its draws (a filtered row has one, in the first chunk's place)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(best_tokens + row)
    if is_drawn(statuses, numbers, row):
        chunk = tl.arange(0, CHUNKS)
        filled = chunk < tl.where(is_filtered(numbers, counts, row, vocab), 1, chunks)
        totals = tl.load(drawn + row * chunks + chunk, mask=filled, other=float("-inf"))
        candidates = tl.load(drawn_tokens + row * chunks + chunk, mask=filled, other=0x7FFFFFFF)
        drawn_token = tl.min(tl.where(totals == tl.max(totals, axis=0), candidates, 0x7FFFFFFF), axis=0)
        token = tl.where(drawn_token < vocab, drawn_token, token)  # a temperature that is NaN draws nothing
    logit = tl.load(logits + row * vocab + token).to(tl.float32)
    logprob = logit - tl.load(normalizers + row)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.where(logprob > LEAST_LOGPROB, logprob, LEAST_LOGPROB))
