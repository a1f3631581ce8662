"""The sampler's first two kernels: what a row's rules make of its logits, and what a row is as a whole.

V logits of a row lie in chunks of CHUNK, a program each; the state kernel, a program a row, joins them in the order of chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.reference.sampling import PENALTY_LEAST, Number, Status

FREQUENCY = tl.constexpr(int(Number.FREQUENCY))
LEAST = tl.constexpr(PENALTY_LEAST)
NOTHING_ALLOWED = tl.constexpr(int(Status.NOTHING_ALLOWED))
NOT_FINITE = tl.constexpr(int(Status.NOT_FINITE))
NUMBERS = tl.constexpr(len(Number))
PRESENCE = tl.constexpr(int(Number.PRESENCE))
REPETITION = tl.constexpr(int(Number.REPETITION))


@triton.jit
def bit_of(words, token, inside):
    return ((tl.load(words + (token >> 5), mask=inside, other=0) >> (token & 31)) & 1) != 0


@triton.jit
def first_from(tokens, low, high, token):
    """The first of the ascending entries low … high - 1 whose token is not below `token`; high if none is."""
    while low < high:
        middle = (low + high) // 2
        if tl.load(tokens + middle) < token:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def penalized(x, numbers, prompt_seen, output_counts, token, inside, HAS_PROMPT: tl.constexpr, HAS_OUTPUT: tl.constexpr):
    """`numbers`, `prompt_seen`, `output_counts` point at the row."""
    repetition = tl.maximum(tl.load(numbers + REPETITION), LEAST).to(tl.float32)
    presence = tl.load(numbers + PRESENCE)
    frequency = tl.load(numbers + FREQUENCY)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        seen = token < 0
        if HAS_PROMPT:
            seen = bit_of(prompt_seen, token, inside)
        if HAS_OUTPUT:
            produced = tl.load(output_counts + token, mask=inside, other=0)
            seen = seen | (produced > 0)
        x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
        if HAS_OUTPUT:
            x = tl.where(produced > 0, x - (presence + frequency * produced.to(tl.float64)).to(tl.float32), x)
    return x


@triton.jit
def rules_kernel(
    work,
    logits,
    numbers,
    allowed,
    prompt_seen,
    output_counts,
    bias_starts,
    bias_tokens,
    bias_values,
    ban_starts,
    ban_tokens,
    parts,
    part_tokens,
    vocab,
    words,
    COPIES: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    HAS_PROMPT: tl.constexpr,
    HAS_OUTPUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_BANS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (R, chunks). Writes `work` (bans not yet in it) where it COPIES, and of each chunk
    parts [R, chunks, 4] = best with bans, best without, largest raw logit (NaN if there is one), Σ exp(raw - that);
    part_tokens [R, chunks, 2] = tokens of the two bests.
    """
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * CHUNK
    token = start + tl.arange(0, CHUNK)
    inside = token < vocab
    raw = tl.load(logits + row * vocab + token, mask=inside, other=float("-inf")).to(tl.float32)
    slot = row * tl.num_programs(1) + tl.program_id(1)
    largest = tl.max(raw, axis=0)
    base = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    broken = tl.sum((raw != raw).to(tl.int32), axis=0) > 0
    tl.store(parts + slot * 4 + 2, tl.where(broken, float("nan"), largest))
    tl.store(parts + slot * 4 + 3, tl.sum(tl.exp(raw - base), axis=0))
    x = raw
    if HAS_ALLOWED:
        x = tl.where(bit_of(allowed + row * words, token, inside), x, float("-inf"))
    if HAS_BIAS:
        high = tl.load(bias_starts + row + 1)
        at = first_from(bias_tokens, tl.load(bias_starts + row), high, start)
        end = first_from(bias_tokens, at, high, start + CHUNK)
        for entry in range(at, end):
            x = tl.where(token == tl.load(bias_tokens + entry), x + tl.load(bias_values + entry), x)
    if HAS_PROMPT or HAS_OUTPUT:
        x = penalized(
            x, numbers + row * NUMBERS, prompt_seen + row * words, output_counts + row * vocab, token, inside, HAS_PROMPT, HAS_OUTPUT
        )
    if COPIES:
        tl.store(work + row * vocab + token, x, mask=inside)
    best, place = tl.max(x, axis=0, return_indices=True)
    tl.store(parts + slot * 4 + 1, best)
    tl.store(part_tokens + slot * 2 + 1, start + place)
    if HAS_BANS:
        high = tl.load(ban_starts + row + 1)
        at = first_from(ban_tokens, tl.load(ban_starts + row), high, start)
        end = first_from(ban_tokens, at, high, start + CHUNK)
        for entry in range(at, end):
            x = tl.where(token == tl.load(ban_tokens + entry), float("-inf"), x)
        best, place = tl.max(x, axis=0, return_indices=True)
    tl.store(parts + slot * 4, best)
    tl.store(part_tokens + slot * 2, start + place)


@triton.jit
def state_kernel(
    statuses,
    bests,
    best_tokens,
    normalizers,
    work,
    ban_starts,
    ban_tokens,
    parts,
    part_tokens,
    histogram,
    sums,
    chunks,
    vocab,
    HAS_ALLOWED: tl.constexpr,
    HAS_BANS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Grid: (R,). Joins the chunks, lifts bans that would leave nothing or writes them into `work`, and clears what filters add to:
    histogram [R, BINS] int32 and sums [R, 2] int64 (mass, candidates).
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    at = (row * chunks + chunk) * 4
    strict = tl.load(parts + at, mask=inside, other=float("-inf"))
    lenient = tl.load(parts + at + 1, mask=inside, other=float("-inf"))
    raw = tl.load(parts + at + 2, mask=inside, other=float("-inf"))
    mass = tl.load(parts + at + 3, mask=inside, other=0.0)
    broken = tl.sum((raw != raw).to(tl.int32), axis=0) > 0
    largest = tl.max(raw, axis=0)
    status = tl.where(broken | (tl.abs(largest) == float("inf")), NOT_FINITE, 0)
    safe = tl.where(status == 0, largest, 0.0)
    base = tl.where(tl.abs(raw) == float("inf"), safe, raw)
    normalizer = safe + tl.log(tl.sum(tl.where(inside, mass * tl.exp(tl.minimum(base - safe, 0.0)), 0.0), axis=0))
    best, place = tl.max(strict, axis=0, return_indices=True)
    token = tl.load(part_tokens + (row * chunks + place) * 2)
    open_best, open_place = tl.max(lenient, axis=0, return_indices=True)
    if HAS_BANS:
        if best == float("-inf"):
            best = open_best
            token = tl.load(part_tokens + (row * chunks + open_place) * 2 + 1)
        else:
            high = tl.load(ban_starts + row + 1)
            for entry in range(tl.load(ban_starts + row), high, ENTRIES):
                place_of = entry + tl.arange(0, ENTRIES)
                banned = tl.load(ban_tokens + place_of, mask=place_of < high, other=-1)
                tl.store(work + row * vocab + banned, float("-inf"), mask=(banned >= 0) & (banned < vocab))
    if HAS_ALLOWED:
        status = tl.where((status == 0) & (open_best == float("-inf")), NOTHING_ALLOWED, status)
    status = tl.where((status == 0) & ((tl.abs(best) == float("inf")) | (best != best)), NOT_FINITE, status)
    tl.store(statuses + row, status)
    tl.store(bests + row, best)
    tl.store(best_tokens + row, tl.where(status == 0, token, 0))
    tl.store(normalizers + row, normalizer)
    tl.store(histogram + row * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
    tl.store(sums + row * 2 + tl.arange(0, 2), tl.zeros((2,), tl.int64))
