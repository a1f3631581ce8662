"""Baselines that look at load alone, or at nothing."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from router.policy.request_view import RequestView
from router.policy.scoring import Candidate, Choice, chosen, least_of


class AnyReplica:
    """By chance."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Choice:
        return chosen(self._random.choice(candidates), "random")


class RoundRobin:
    """Each in turn."""

    def __init__(self, seed: int) -> None:
        self._last = -1

    def choose(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Choice:
        following = [one for one in candidates if one.tiebreak > self._last]
        one = min(following or candidates, key=lambda candidate: candidate.tiebreak)
        self._last = one.tiebreak
        return chosen(one, "round_robin")


class LeastRequests:
    """The fewest requests there, whatever they cost."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Choice:
        return least_of(candidates, [one.forecast.batch for one in candidates], self._random, "least_requests")


class PowerOfTwo:
    """Two by chance, of them the one with fewer requests."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Choice:
        two = self._random.sample(candidates, min(2, len(candidates)))
        return least_of(two, [one.forecast.batch for one in two], self._random, "power_of_two")
