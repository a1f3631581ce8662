"""Which replica gets a request. One small interface; the rules behind it are values of the configuration's `policy`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol

import msgspec

from router.policy.forecast import Forecast
from router.policy.incarnation import Incarnation
from router.policy.request_view import RequestView

PolicyName = Literal["least_ttft", "least_requests", "round_robin"]

TIE = 0.05


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A replica that may take the request, and what is to be expected there."""

    incarnation: Incarnation
    forecast: Forecast
    scale: float  # learned, of its TTFT
    keeps_tpot: bool
    is_stale: bool  # its report is older than its lease
    tiebreak: int = 0  # order of membership, for round robin


@dataclass(frozen=True, slots=True)
class Choice:
    incarnation: Incarnation
    forecast: Forecast
    reason: str


class Policy(Protocol):
    def choose(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Choice:
        """One of `candidates`, of which there is at least one."""
        ...


class LeastTtft:
    """The least predicted time to first token; ties within 5 % by new tokens × batch, then by this router's own seed."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Choice:
        pool = _preferred(candidates)
        scores = [max(0.0, one.scale * one.forecast.score_s) for one in pool]
        least = min(scores)
        near = [one for one, score in zip(pool, scores, strict=True) if score <= least * (1 + TIE) + 1e-9]
        if len(near) == 1:
            return _chosen(near[0], "least_ttft")
        costs = [_work(one.forecast) for one in near]
        cheapest = min(costs)
        equal = [one for one, cost in zip(near, costs, strict=True) if cost <= cheapest]
        return _chosen(equal[0] if len(equal) == 1 else self._random.choice(equal), "tie")


class LeastRequests:
    """The fewest requests there, whatever they cost."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Choice:
        fewest = min(one.forecast.batch for one in candidates)
        return _chosen(self._random.choice([one for one in candidates if one.forecast.batch == fewest]), "least_requests")


class RoundRobin:
    """Each in turn."""

    def __init__(self, seed: int) -> None:
        self._last = -1

    def choose(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Choice:
        following = [one for one in candidates if one.tiebreak > self._last]
        one = min(following or candidates, key=lambda candidate: candidate.tiebreak)
        self._last = one.tiebreak
        return _chosen(one, "round_robin")


def policy_named(name: PolicyName, seed: int) -> Policy:
    if name == "round_robin":
        return RoundRobin(seed)
    if name == "least_requests":
        return LeastRequests(seed)
    return LeastTtft(seed)


def _preferred(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Fresh ones before stale ones, among them those that keep the inter-token time: whoever is left if none does."""
    fresh = [one for one in candidates if not one.is_stale] or candidates
    return [one for one in fresh if one.keeps_tpot] or fresh


def _work(forecast: Forecast) -> float:
    """New tokens × batch: what this placement costs everyone there."""
    return forecast.charged_tokens * forecast.batch


def _chosen(one: Candidate, reason: str) -> Choice:
    return Choice(one.incarnation, one.forecast, reason)
