"""Was a stream lost, was the text kept? Compares token ids with an undisturbed run, allowing only near-ties to differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from bench.record import Outcome, RequestRecord

NEAR_TIE_NAT = 1e-3


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position at which two runs differ, and the gap between the two likeliest tokens there (nats)."""

    stream: int
    position: int
    gap_nat: float

    @property
    def excused(self) -> bool:
        return self.gap_nat < NEAR_TIE_NAT


def lost_streams(records: Sequence[RequestRecord]) -> dict[str, str]:
    """What became of each stream that did not complete, by its number."""
    return {
        str(i): f"{record.outcome}, status {record.status}, {record.tokens_seen} tokens, {'; '.join(record.problems)}"
        f"{record.refusal.body.decode(errors='replace')[:200]}"
        for i, record in enumerate(records)
        if record.outcome is not Outcome.COMPLETED
    }


class _Logprobs(msgspec.Struct):
    """The completions endpoint's logprobs object."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Per token: its log probability (None for a prompt's first), and the gap between the two likeliest."""

    logprobs: tuple[float | None, ...]
    gaps_nat: tuple[float, ...]


def read_scores(parts: Sequence[bytes]) -> Scores:
    """Scores from the raw logprobs objects of one choice, in order. Raises msgspec.MsgspecError for another shape.

    Where the server names fewer than two alternatives the gap is infinite: nothing is excused there.
    """
    logprobs: list[float | None] = []
    gaps: list[float] = []
    for part in parts:
        decoded = msgspec.json.decode(part, type=_Logprobs)
        logprobs += decoded.token_logprobs
        tops = decoded.top_logprobs or [None] * len(decoded.token_logprobs)
        gaps += [_gap(top) for top in tops]
    return Scores(tuple(logprobs), tuple(gaps))


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that differs; a shorter list differs where it ends. None: equal."""
    for i, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return i
    return None if len(expected) == len(got) else min(len(expected), len(got))


def compare(stream: int, expected: Sequence[int], got: Sequence[int], gaps_nat: Sequence[float]) -> Difference | None:
    """How one stream differs from its undisturbed run. `gaps_nat` belongs to `expected`; beyond its end nothing is excused."""
    position = first_difference(expected, got)
    if position is None:
        return None
    return Difference(stream, position, gaps_nat[position] if position < len(gaps_nat) else math.inf)


def _gap(top: dict[str, float] | None) -> float:
    best = sorted((top or {}).values(), reverse=True)
    return best[0] - best[1] if len(best) >= 2 else math.inf
