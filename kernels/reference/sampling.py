"""From logits to tokens, with everything a request may ask of them: the definition of the fused sampler, and what it is told.

The meaning is that of docs/sampling.md and of replica/sampler.py; randomness is kernels/reference/noise.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.reference.noise import gumbel, noise_bits, stream_key

Values = npt.NDArray[np.floating[Any]]
GREEDY_BELOW = 1e-5  # temperatures under it are greedy: dividing by them says the same, and overflows
PENALTY_LEAST = 1e-20  # smaller repetition penalties do as it does
IMPOSSIBLE = -9999.0  # the least log probability that is reported


class Number(IntEnum):
    """Columns of SamplingRows.numbers."""

    TEMPERATURE = 0
    TOP_P = 1  # 1: off
    MIN_P = 2  # 0: off
    REPETITION = 3  # 1: off
    PRESENCE = 4
    FREQUENCY = 5


class Count(IntEnum):
    """Columns of SamplingRows.counts."""

    SEED = 0  # its low 64 bits
    CHOICE = 1
    POSITION = 2
    TOP_K = 3  # 0, or V and more: off


class Status(IntEnum):
    FINE = 0
    NOT_FINITE = 1  # the row has a NaN or +inf, or nothing but -inf, before its rules or after them
    NOTHING_ALLOWED = 2  # what `allowed` leaves is -inf


@dataclass(frozen=True, slots=True)
class TokenLists:
    """A list for each row: entries starts[r] … starts[r + 1] - 1, in ascending order of token; ids outside V say nothing."""

    starts: Tensor  # [R + 1] int32
    tokens: Tensor  # [N] int32, of a capacity of at least starts[R]
    values: Tensor  # [N] float32; a list of bans has no use for them


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What R rows ask. Bit t % 32 of word t // 32 of a mask stands for token t; what is None asks nothing of any row."""

    numbers: Tensor  # [R, 6] float64, columns by Number
    counts: Tensor  # [R, 4] int64, columns by Count
    allowed: Tensor | None = None  # [R, ⌈V / 32⌉] int32: allowed_token_ids and the grammar
    prompt_seen: Tensor | None = None  # [R, ⌈V / 32⌉] int32: tokens of the prompt
    output_counts: Tensor | None = None  # [R, V] int32: how often each was produced
    bias: TokenLists | None = None
    banned: TokenLists | None = None  # bad words and min_tokens; lifted where they would leave nothing


@dataclass(frozen=True, slots=True)
class Sampled:
    """Where a status is not FINE the token is 0 and its log probability means nothing."""

    tokens: Tensor  # [R] int64
    statuses: Tensor  # [R] int32
    logprobs: Tensor  # [R] float32, of the logits as they came
    top_tokens: Tensor  # [R, n] int64, the likeliest first, of equals the first
    top_logprobs: Tensor  # [R, n] float32


def sampling(logits: Tensor, rows: SamplingRows, top_logprobs: int = 0) -> Sampled:
    """One token for each row of logits [R, V]: float64 computes in float64, all else in float32.

    allowed and banned → -inf, bias added, repetition, then presence and frequency penalties; temperature; min-p, top-k, top-p;
    the largest logit + noise. `top_logprobs` n ≤ V.
    """
    exact = logits.to("cpu", torch.float64 if logits.dtype is torch.float64 else torch.float32)
    found = [_sample_row(exact[row].numpy(), _Row(rows, row, exact.shape[1])) for row in range(exact.shape[0])]
    tokens = torch.tensor([token for token, _ in found], dtype=torch.int64)
    logprobs = exact - exact.logsumexp(-1, keepdim=True)
    order = torch.argsort(exact, dim=-1, descending=True, stable=True)[:, :top_logprobs]
    return Sampled(
        tokens.to(logits.device),
        torch.tensor([status for _, status in found], dtype=torch.int32, device=logits.device),
        _finite(logprobs.gather(1, tokens[:, None])[:, 0]).to(logits.device),
        order.to(logits.device),
        _finite(logprobs.gather(1, order)).to(logits.device),
    )


def _finite(logprobs: Tensor) -> Tensor:
    return logprobs.float().nan_to_num(IMPOSSIBLE).clamp_min_(IMPOSSIBLE)


class _Row:
    """One row's part of SamplingRows, as numpy."""

    def __init__(self, rows: SamplingRows, row: int, vocab: int) -> None:
        self.number = [float(value) for value in rows.numbers[row].tolist()]
        self.count = [int(value) for value in rows.counts[row].tolist()]
        self.allowed = _bits(rows.allowed, row)
        self.prompt_seen = _bits(rows.prompt_seen, row)
        self.output_counts = None if rows.output_counts is None else rows.output_counts[row].cpu().numpy()
        self.bias = _entries(rows.bias, row, vocab)
        self.banned = _entries(rows.banned, row, vocab)[0]


def _bits(words: Tensor | None, row: int) -> npt.NDArray[np.bool_] | None:
    if words is None:
        return None
    return np.unpackbits(words[row].cpu().numpy().view(np.uint8), bitorder="little").view(np.bool_)


def _entries(lists: TokenLists | None, row: int, vocab: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    if lists is None:
        return np.zeros(0, np.int32), np.zeros(0, np.float32)
    part = slice(int(lists.starts[row]), int(lists.starts[row + 1]))
    tokens, values = lists.tokens[part].cpu().numpy(), lists.values[part].cpu().numpy()
    inside = (tokens >= 0) & (tokens < vocab)
    return tokens[inside], values[inside]


def _sample_row(raw: Values, row: _Row) -> tuple[int, Status]:
    if not np.isfinite(raw.max()):
        return 0, Status.NOT_FINITE
    x = raw.copy()
    if row.allowed is not None:
        x[~row.allowed[: x.size]] = -np.inf
        if np.isneginf(x.max()):
            return 0, Status.NOTHING_ALLOWED
    _apply_rules(x, row)
    best = int(x.argmax())
    if not np.isfinite(x[best]):
        return 0, Status.NOT_FINITE
    if row.number[Number.TEMPERATURE] < GREEDY_BELOW:
        return best, Status.FINE
    scaled = (x - x[best]) / x.dtype.type(row.number[Number.TEMPERATURE])
    kept = np.flatnonzero(scaled >= _threshold(scaled, row))
    key = np.uint64(stream_key(row.count[Count.SEED], row.count[Count.CHOICE], row.count[Count.POSITION]))
    sums = scaled[kept].astype(np.float64) + gumbel(noise_bits(key, kept))
    return int(kept[sums.argmax()]), Status.FINE


def _apply_rules(x: Values, row: _Row) -> None:
    before = x[row.banned]
    x[row.banned] = -np.inf
    if np.isneginf(x.max()):
        x[row.banned] = before
    np.add.at(x, row.bias[0], row.bias[1].astype(x.dtype))
    produced = np.zeros(x.size, np.int32) if row.output_counts is None else row.output_counts
    repetition = x.dtype.type(max(row.number[Number.REPETITION], PENALTY_LEAST))
    if repetition != 1:
        seen = produced > 0
        if row.prompt_seen is not None:
            seen = seen | row.prompt_seen[: x.size]
        x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
    presence, frequency = row.number[Number.PRESENCE], row.number[Number.FREQUENCY]
    if presence != 0 or frequency != 0:
        at = np.flatnonzero(produced)
        x[at] -= (presence + frequency * produced[at]).astype(x.dtype)


def _threshold(scaled: Values, row: _Row) -> float:
    """Least scaled logit that may be drawn. What ties with the last one kept is kept; the best (0) always is."""
    top_k, top_p, min_p = row.count[Count.TOP_K], row.number[Number.TOP_P], row.number[Number.MIN_P]
    least = min(float(scaled.dtype.type(np.log(min_p))), 0.0) if min_p > 0 else -np.inf
    descending = np.sort(scaled[scaled >= least])[::-1]
    if 0 < top_k < scaled.size:
        descending = descending[:top_k]
        least = float(descending[-1])
    if top_p < 1.0:
        mass = np.exp(descending.astype(np.float64)).cumsum()
        place = int(np.searchsorted(mass, top_p * mass[-1]))
        least = float(descending[min(place, descending.size - 1)])
    return least
