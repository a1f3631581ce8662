"""Which replica gets a request: what a policy sees, what it answers, and our own rule. The others are beside it, by name in `policies`."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

import msgspec

from router.policy.forecast import Forecast
from router.policy.incarnation import Incarnation
from router.policy.load import ReplicaView
from router.policy.request_view import RequestView

TIE = 0.05


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A replica that may take the request, and what is to be expected there. Policies only read `view`."""

    incarnation: Incarnation
    forecast: Forecast
    view: ReplicaView
    scale: float  # learned, of its TTFT
    keeps_tpot: bool
    is_stale: bool  # its report is older than its lease
    tiebreak: int = 0  # order of membership, for round robin
    utilisation: float = 0.0  # of the replicas lately, below 1

    @property
    def queued_tokens(self) -> int:
        """Prefill tokens it has before this request."""
        return self.view.load.queued_prefill_tokens + self.view.claims.new_tokens


class Choice(msgspec.Struct, frozen=True, gc=False):
    incarnation: Incarnation
    forecast: Forecast
    reason: str


class Policy(Protocol):
    def choose(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Choice:
        """One of `candidates`, of which there is at least one."""
        ...


class LeastDelay:
    """The least delay for everyone: its own until its first token, and that of all who come later.

    A second of prefill holds up whoever comes while it lasts, they hold up others, and so on: on a replica that is busy a part ρ of the
    time, for 1 / (1 − ρ) seconds in all. Of these its own time to first token counts one already. Idle replicas: the least time to
    first token. Ties within 5 % by new tokens × batch, then by this router's own seed.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Choice:
        pool = _preferred(candidates)
        delays = [max(0.0, one.scale * (one.forecast.score_s + _delay_of_others_s(one))) for one in pool]
        return _least(pool, delays, self._random, "least_delay")


class LeastTtft:
    """The least predicted time to first token, whatever that costs others; ties as above."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Choice:
        pool = _preferred(candidates)
        return _least(pool, [max(0.0, one.scale * one.forecast.score_s) for one in pool], self._random, "least_ttft")


def _least(pool: Sequence[Candidate], scores: Sequence[float], random: Random, reason: str) -> Choice:
    least = min(scores)
    near = [one for one, score in zip(pool, scores, strict=True) if score <= least * (1 + TIE) + 1e-9]
    if len(near) == 1:
        return chosen(near[0], reason)
    return least_of(near, [_work(one.forecast) for one in near], random, "tie")


def chosen(one: Candidate, reason: str) -> Choice:
    return Choice(one.incarnation, one.forecast, reason)


def least_of(candidates: Sequence[Candidate], costs: Sequence[float], random: Random, reason: str) -> Choice:
    """The cheapest; equal ones are drawn."""
    cheapest = min(costs)
    equal = [one for one, cost in zip(candidates, costs, strict=True) if cost <= cheapest]
    return chosen(equal[0] if len(equal) == 1 else random.choice(equal), reason)


def _preferred(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Fresh ones before stale ones, among them those that keep the inter-token time: whoever is left if none does."""
    fresh = [one for one in candidates if not one.is_stale] or candidates
    return [one for one in fresh if one.keeps_tpot] or fresh


def _work(forecast: Forecast) -> float:
    """New tokens × batch: what this placement costs everyone there."""
    return forecast.charged_tokens * forecast.batch


def _delay_of_others_s(one: Candidate) -> float:
    """By what it makes a replica work, beyond the work itself."""
    return one.forecast.charged_tokens * one.forecast.token_s * one.utilisation / (1.0 - one.utilisation)
