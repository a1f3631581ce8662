"""Can a promise be kept? Queue time = arrival at the router until the first step that schedules the request (DESIGN §7).

Three answers by three quantiles of one prediction: *admit* where the high one keeps the queue time and the time to first
token, and the step model the time per token; *shed* where even the hopeful one breaks them everywhere; *wait* at the router
in between. An empty replica always admits: a wrong model may make the router careful, never deaf.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import msgspec

from router.policy.calibration import Calibration
from router.policy.classes import Slo
from router.policy.request_view import RequestView
from router.policy.scoring import Candidate, Choice, Policy

HOPEFUL_QUANTILE = 0.1
RETRY_AFTER_MAX_S = 30.0
LEAN_STEPS = 0.5
_JITTER = 0.25  # of Retry-After: those shed together do not come back together


class Outlay(msgspec.Struct, frozen=True, gc=False):
    """A candidate, and how long the request would wait there."""

    candidate: Candidate
    waits: Calibration  # of this replica
    ttfts: Calibration  # of this replica and as much to prefill
    is_empty: bool

    def wait_s(self, quantile: float, now: float) -> float:
        """Stays below it with this probability, calibrated."""
        forecast = self.candidate.forecast
        return self.waits.quantile_s(forecast.wait_s, forecast.grain_s, quantile, now)

    def ttft_s(self, quantile: float, now: float) -> float:
        """As `wait_s`, until the first token."""
        forecast = self.candidate.forecast
        return self.ttfts.quantile_s(forecast.ttft_s, forecast.grain_s, quantile, now)


class Admit(msgspec.Struct, frozen=True, gc=False):
    choice: Choice


@dataclass(frozen=True, slots=True)
class Wait:
    """`service_s` is the work it puts before those behind it, spread over the replicas; the rest as of the replica with the least wait."""

    service_s: float
    new_tokens: int
    prefill_s: float


class Kind(enum.StrEnum):
    """Of a promise."""

    QUEUE_TIME = "queue_time"
    TTFT = "ttft"
    TPOT = "tpot"


class Shed(msgspec.Struct, frozen=True, gc=False):
    retry_after_s: float
    expected_s: float  # what it would have had
    limit_s: float  # what was promised
    kind: Kind


Verdict = Admit | Wait | Shed


class _Delay(msgspec.Struct, frozen=True, gc=False):
    """By how much a request delays those behind it on one replica, calibrated."""

    service_s: float
    token_s: float  # of that, per token to prefill
    tokens_max: int

    @classmethod
    def of(cls, one: Outlay, now: float) -> _Delay:
        forecast, scale = one.candidate.forecast, one.waits.scale(now)
        return cls(forecast.service_s * scale, forecast.token_s * scale, one.candidate.view.limits.max_model_len)

    def seconds(self, tokens: int) -> float:
        """Of a prompt of at least so many. A seat's time is the same for any length: only what is prefilled grows with it."""
        return max(self.service_s, min(tokens, self.tokens_max) * self.token_s)


@dataclass(frozen=True, slots=True)
class Overrun:
    """How a promise would be broken: all of a refusal but its turn among those who were told to come back."""

    over_s: float  # after that, there would be room
    expected_s: float
    limit_s: float
    kind: Kind
    delays: tuple[_Delay, ...] = ()  # by replica; none where there is no turn


class Promise(msgspec.Struct, frozen=True, gc=False):
    """What was promised, how much of it is used up, and how much queued work comes before."""

    slo: Slo
    waited_s: float
    ahead_s: float  # of batches waiting at the router before this one, spread over the replicas
    depth_s: float = math.inf  # no more wait at a replica than this: others must still find room in theirs
    is_lean: bool = False  # others have a better claim: it goes to a replica only when that is about to run dry

    @property
    def slo_s(self) -> float:
        return self.slo.queue_time_s


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
        best = min(outlays, key=lambda one: one.candidate.forecast.ttft_s)
        prefill_s = best.ttft_s(HOPEFUL_QUANTILE, now) - best.wait_s(HOPEFUL_QUANTILE, now)
        return Wait(self._service_s(outlays, now), best.candidate.forecast.new_tokens, max(0.0, prefill_s))

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

        Nor is there hope where not even a replica of its own would be fast enough per token: to wait for one would not help.

        A first step may have stalled: who waits here a little sees the truth, who is refused never does.
        """
        for one in outlays:
            if not _could_keep_tpot(one, promise):
                continue
            left_s = promise.slo_s - promise.waited_s
            if (promise.ahead_s + one.wait_s(HOPEFUL_QUANTILE, now)) / one.waits.doubt > left_s:
                continue
            within_s = promise.slo.ttft_within_s(one.candidate.forecast.new_tokens) - promise.waited_s
            if within_s == math.inf or (promise.ahead_s + one.ttft_s(HOPEFUL_QUANTILE, now)) / one.ttfts.doubt <= within_s:
                return False
        return True

    def least_s(self, outlays: Sequence[Outlay], now: float) -> tuple[float, float]:
        """A hopeful bound of the wait for all who wait here, and what it may be divided by."""
        return min(one.wait_s(HOPEFUL_QUANTILE, now) for one in outlays), max(max(one.waits.doubt, one.ttfts.doubt) for one in outlays)

    def place(self, request: RequestView, outlays: Sequence[Outlay], now: float) -> Choice:
        """The policy's choice; alone, it is for a stream that was admitted before and moves: it is not judged again."""
        return self._policy.choose(request, [one.candidate for one in outlays], now)

    def shed(self, promise: Promise, outlays: Sequence[Outlay], now: float, *, tokens: int = 0) -> Shed:
        """`turn_away` of what `overrun` finds."""
        return self.turn_away(self.overrun(promise, outlays, now), now, tokens=tokens)

    def overrun(self, promise: Promise, outlays: Sequence[Outlay], now: float) -> Overrun:
        """How the promise would be broken; the same for all of its kind, until something happens."""
        if not any(_could_keep_tpot(one, promise) for one in outlays):
            return _tpot_overrun(promise, outlays)
        over_s = min(self._over_s(one, promise, now) for one in outlays)
        best = min(outlays, key=lambda one: one.wait_s(0.5, now))
        expected_s = promise.waited_s + promise.ahead_s + best.wait_s(0.5, now)
        limit_s, kind = promise.slo_s, Kind.QUEUE_TIME
        within_s = promise.slo.ttft_within_s(best.candidate.forecast.new_tokens)
        if within_s < math.inf and expected_s <= promise.slo_s:
            expected_s, limit_s = promise.waited_s + promise.ahead_s + best.ttft_s(0.5, now), within_s
            kind = Kind.TTFT
        return Overrun(max(0.05, over_s), expected_s, limit_s, kind, tuple(_Delay.of(one, now) for one in outlays))

    def turn_away(self, overrun: Overrun, now: float, *, tokens: int = 0) -> Shed:
        """Retry-After: when a request like this one would be admitted, after all who were told to come back before it; plus jitter.

        `tokens`: of its prompt, where it is only guessed, and the overrun is of the least request.
        """
        wait_s = overrun.over_s
        if overrun.kind is not Kind.TPOT:  # such a one has no turn: only an idle replica would take it
            turn_s = min(max(now + wait_s, self._returning_s), now + RETRY_AFTER_MAX_S)
            service_s = min([delay.seconds(tokens) for delay in overrun.delays]) / len(overrun.delays)
            self._returning_s = min(turn_s + service_s, now + RETRY_AFTER_MAX_S)
            wait_s = turn_s - now
        return Shed(self.jittered(wait_s), overrun.expected_s, overrun.limit_s, overrun.kind)

    def is_about_dry(self, one: Outlay, now: float) -> bool:
        """The step after the one that runs would be half empty, whoever passes whom."""
        forecast = one.candidate.forecast
        return one.is_empty or one.waits.scale(now) * forecast.after_s <= LEAN_STEPS * forecast.grain_s

    def jittered(self, seconds: float) -> float:
        return seconds * (1.0 + _JITTER * self._random.random())

    def _keeps(self, one: Outlay, promise: Promise, now: float) -> bool:
        if one.is_empty:
            return True
        slo, forecast = promise.slo, one.candidate.forecast
        wait_s = one.wait_s(self._quantile, now)
        if promise.waited_s + wait_s > slo.queue_time_s or wait_s > promise.depth_s:
            return False
        if promise.is_lean and not self.is_about_dry(one, now):
            return False
        if slo.ttft_s is not None and promise.waited_s + one.ttft_s(self._quantile, now) > slo.ttft_within_s(forecast.new_tokens):
            return False
        return slo.tpot_s is None or forecast.tpot_s <= slo.tpot_s

    def _over_s(self, one: Outlay, promise: Promise, now: float) -> float:
        """By how much it would break the promise there, with what comes before it, were it new."""
        over_s = promise.ahead_s + one.wait_s(self._quantile, now) - promise.slo_s
        within_s = promise.slo.ttft_within_s(one.candidate.forecast.new_tokens)
        return over_s if within_s == math.inf else max(over_s, promise.ahead_s + one.ttft_s(self._quantile, now) - within_s)

    def _service_s(self, outlays: Sequence[Outlay], now: float) -> float:
        """By how much it delays those behind it, spread over the replicas."""
        return min(_Delay.of(one, now).service_s for one in outlays) / len(outlays)


def _could_keep_tpot(one: Outlay, promise: Promise) -> bool:
    """If it had the replica to itself."""
    return promise.slo.tpot_s is None or one.candidate.forecast.alone_tpot_s / one.waits.doubt <= promise.slo.tpot_s


def _tpot_overrun(promise: Promise, outlays: Sequence[Outlay]) -> Overrun:
    assert promise.slo.tpot_s is not None
    idle_s = min(RETRY_AFTER_MAX_S, max(0.05, min(one.candidate.forecast.idle_s for one in outlays)))
    tpot_s = min(one.candidate.forecast.alone_tpot_s for one in outlays)
    return Overrun(idle_s, tpot_s, promise.slo.tpot_s, Kind.TPOT)
