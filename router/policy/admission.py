"""Can a promise be kept? Queue time = arrival at the router until the first step that schedules the request (DESIGN §7).

Three answers by three quantiles of one prediction: *admit* where the high one keeps the SLO, *shed* where even the
hopeful one breaks it everywhere, *wait* at the router in between. An empty replica always admits: a wrong model may make
the router careful, never deaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import msgspec

from router.policy.calibration import Calibration
from router.policy.request_view import RequestView
from router.policy.scoring import Candidate, Choice, Policy

HOPEFUL_QUANTILE = 0.1
RETRY_AFTER_MAX_S = 30.0
_JITTER = 0.25  # of Retry-After: those shed together do not come back together


class Outlay(msgspec.Struct, frozen=True, gc=False):
    """A candidate, and how long the request would wait there."""

    candidate: Candidate
    waits: Calibration  # of this replica
    is_empty: bool

    def wait_s(self, quantile: float, now: float) -> float:
        """Stays below it with this probability, calibrated."""
        forecast = self.candidate.forecast
        return self.waits.quantile_s(forecast.wait_s, forecast.grain_s, quantile, now)


@dataclass(frozen=True, slots=True)
class Admit:
    choice: Choice


@dataclass(frozen=True, slots=True)
class Wait:
    """`service_s` is the work it puts before those behind it, spread over the replicas."""

    service_s: float


@dataclass(frozen=True, slots=True)
class Shed:
    retry_after_s: float
    expected_s: float  # the queue time it would have had


Verdict = Admit | Wait | Shed


@dataclass(frozen=True, slots=True)
class Promise:
    """What was promised, how much of it is used up, and how much queued work comes before."""

    slo_s: float
    waited_s: float
    ahead_s: float  # of batches waiting at the router before this one, spread over the replicas


class Admission:
    def __init__(self, policy: Policy, quantile: float, seed: int) -> None:
        self._policy = policy
        self._quantile = quantile
        self._random = Random(seed)
        self._returning_s = 0.0  # until then the replicas are busy with those who were told to come back

    def judge(self, request: RequestView, promise: Promise, outlays: Sequence[Outlay], now: float) -> Verdict:
        """`outlays`: at least one, of replicas that are healthy and could ever run it."""
        choice = self.admit(request, promise, outlays, now)
        if choice is not None:
            return Admit(choice)
        if self.is_hopeless(promise, outlays, now):
            return self.shed(promise, outlays, now)
        return Wait(self._service_s(outlays, now))

    def admit(self, request: RequestView, promise: Promise, outlays: Sequence[Outlay], now: float) -> Choice | None:
        """Only the first answer: None refuses nobody, and may be asked as often as one likes."""
        if promise.ahead_s > 0:
            return None
        choice = self.place(request, outlays, now)  # most often the best one keeps the promise: no need to ask all
        if any(one.candidate.incarnation == choice.incarnation and self._keeps(one, promise, now) for one in outlays):
            return choice
        keeping = [one for one in outlays if self._keeps(one, promise, now)]
        return self.place(request, keeping, now) if keeping else None

    def is_hopeless(self, promise: Promise, outlays: Sequence[Outlay], now: float) -> bool:
        """Not even by a hopeful guess; of a replica that has proved nothing yet, the guess is that its model is several times too slow.

        A first step may have stalled: who waits here a little sees the truth, who is refused never does.
        """
        least_s = min((promise.ahead_s + one.wait_s(HOPEFUL_QUANTILE, now)) / one.waits.doubt for one in outlays)
        return promise.waited_s + least_s > promise.slo_s

    def place(self, request: RequestView, outlays: Sequence[Outlay], now: float) -> Choice:
        """The policy's choice; alone, it is for a stream that was admitted before and moves: it is not judged again."""
        return self._policy.choose(request, [one.candidate for one in outlays], now)

    def shed(self, promise: Promise, outlays: Sequence[Outlay], now: float) -> Shed:
        """Retry-After: when a request like this one would be admitted, after all who were told to come back before it; plus jitter."""
        certain_s = promise.ahead_s + min(one.wait_s(self._quantile, now) for one in outlays)
        free_s = now + max(0.05, certain_s - promise.slo_s)
        turn_s = min(max(free_s, self._returning_s), now + RETRY_AFTER_MAX_S)
        self._returning_s = turn_s + self._service_s(outlays, now)
        expected_s = promise.ahead_s + min(one.wait_s(0.5, now) for one in outlays)
        return Shed(self.jittered(turn_s - now), promise.waited_s + expected_s)

    def jittered(self, seconds: float) -> float:
        return seconds * (1.0 + _JITTER * self._random.random())

    def _keeps(self, one: Outlay, promise: Promise, now: float) -> bool:
        return one.is_empty or promise.waited_s + one.wait_s(self._quantile, now) <= promise.slo_s

    def _service_s(self, outlays: Sequence[Outlay], now: float) -> float:
        """By how much it delays those behind it, spread over the replicas."""
        return min(one.candidate.forecast.service_s * one.waits.scale(now) for one in outlays) / len(outlays)
