"""Arrivals: admitted, made to wait, or refused (pure; DESIGN §7). Holds the queue of batches that wait at the router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.config import RouterConfig
from router.policy.admission import Admission, Admit, Promise, Shed
from router.policy.fleet import Fleet, Known
from router.policy.forecast import fits
from router.policy.policies import policy_named
from router.policy.queue import Waiting, WaitQueue
from router.policy.request_view import RequestView
from router.policy.scoring import Choice
from router.ports import Batch

NO_REPLICA_RETRY_S = 2.0
LEAST = RequestView(prompt_tokens=1, block_keys=(), max_tokens=1)  # no request waits less


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    reason: str
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    batch_id: int
    choice: Choice


@dataclass(frozen=True, slots=True)
class Refused:
    batch_id: int
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Queued:
    batch_id: int


Answer = Admitted | Refused | Queued


class Reception:
    def __init__(self, config: RouterConfig, fleet: Fleet, seed: int) -> None:
        self._fleet = fleet
        self._slo_s = config.queue_time_slo_s
        self._admission = Admission(policy_named(config.policy, seed), config.admission_quantile, seed)
        self.queue = WaitQueue(config.queue_depth_max, config.queue_tokens_max)

    def arrive(self, batch_id: int, batch: Batch, view: RequestView, now: float) -> Answer:
        candidates = self._fleet.routable()
        impossible = self._never_fits(view)
        if impossible is not None:
            return Refused(batch_id, impossible)
        outlays = self._fleet.outlays(view, candidates, now)
        if not outlays:
            return Refused(batch_id, self.no_replica())
        slo_s = self._slo_s if batch.queue_time_slo_s is None else batch.queue_time_slo_s
        promise = Promise(slo_s, max(0.0, now - batch.arrival_s), self.queue.ahead_s(batch.arrival_s + slo_s))
        if len(outlays) < len(candidates):  # only a sample was asked: who finds no place in it asks everyone
            choice = self._admission.admit(view, promise, outlays, now)
            if choice is not None:
                return Admitted(batch_id, choice)
            outlays = self._fleet.outlays(view, candidates, now, sample=False)
        verdict = self._admission.judge(view, promise, outlays, now)
        if isinstance(verdict, Admit):
            return Admitted(batch_id, verdict.choice)
        if isinstance(verdict, Shed):
            return Refused(batch_id, _queue_time(verdict, slo_s))
        if not self.queue.has_room(view):
            shed = self._admission.shed(promise, outlays, now)
            return Refused(batch_id, Refusal(429, "queue_full", "the router's queue is full", shed.retry_after_s))
        self.queue.add(Waiting(batch_id, view, batch.arrival_s, slo_s, verdict.service_s))
        return Queued(batch_id)

    def foresee(self, arrival_s: float, slo_s: float | None, about_tokens: int, now: float) -> Refusal | None:
        """Would even the least request be shed? Prompts hardly change the wait for a first step: this spares reading most of them.

        None where no replica is known to be there, or one could keep the promise for something: `arrive` decides.
        """
        outlays = self._fleet.outlays(LEAST, self._fleet.routable(), now, sample=False)
        if not outlays or any(one.is_empty for one in outlays):
            return None
        slo_s = self._slo_s if slo_s is None else slo_s
        promise = Promise(slo_s, max(0.0, now - arrival_s), self.queue.ahead_s(arrival_s + slo_s))
        if not self._admission.is_hopeless(promise, outlays, now):
            return None
        return _queue_time(self._admission.shed(promise, outlays, now, times=max(1, about_tokens)), slo_s)

    def head(self, candidates: Sequence[Known], now: float) -> Admitted | None:
        """Judge the head against replicas whose state is new. The head leaves the queue when it is admitted."""
        head = self.queue.head()
        if head is None:
            return None
        outlays = self._fleet.outlays(head.view, candidates, now)
        if not outlays:
            return None
        promise = Promise(head.slo_s, max(0.0, now - head.arrival_s), 0.0)
        choice = self._admission.admit(head.view, promise, outlays, now)
        if choice is None:
            return None
        self.queue.remove(head.batch_id)
        return Admitted(head.batch_id, choice)

    def sweep(self, now: float) -> list[Refused]:
        """Who has become hopeless leaves. Cheap for all, exact for those it seems to concern. To be called every 25 ms or so."""
        head = self.queue.head()
        if head is None:
            return []
        candidates = self._fleet.routable()
        if not candidates:
            gone = [Refused(one.batch_id, self.no_replica()) for one in self.queue]
            for one in gone:
                self.queue.remove(one.batch_id)
            return gone
        outlays = self._fleet.outlays(head.view, candidates, now)
        ahead_s = 0.0
        refused: list[Refused] = []
        for waiting in self.queue:
            promise = Promise(waiting.slo_s, now - waiting.arrival_s, ahead_s)
            if not outlays or self._admission.is_hopeless(promise, outlays, now):
                own = self._fleet.outlays(waiting.view, candidates, now)
                if not own or self._admission.is_hopeless(promise, own, now):
                    self.queue.remove(waiting.batch_id)
                    shed = self._admission.shed(promise, own, now) if own else None
                    refusal = _queue_time(shed, waiting.slo_s, "queue_time_waited") if shed else self.no_replica()
                    refused.append(Refused(waiting.batch_id, refusal))
                    continue
            ahead_s += waiting.service_s
        return refused

    def place(self, view: RequestView, candidates: Sequence[Known], now: float) -> Choice | None:
        """For a stream that was admitted before: never refused, None only if nobody here could run it."""
        outlays = self._fleet.outlays(view, candidates, now) or self._fleet.outlays(view, candidates, now, sample=False)
        return self._admission.place(view, outlays, now) if outlays else None

    def full(self, view: RequestView, now: float) -> Refusal:
        """A replica's own queue was full: when to come back."""
        outlays = self._fleet.outlays(view, self._fleet.routable(), now)
        if not outlays:
            return self.no_replica()
        shed = self._admission.shed(Promise(self._slo_s, 0.0, self.queue.work_s), outlays, now)
        return Refusal(429, "queue_full", "the replicas' queues are full", shed.retry_after_s)

    def no_replica(self) -> Refusal:
        return Refusal(503, "no_replica", "no healthy replica", self._admission.jittered(NO_REPLICA_RETRY_S))

    def _never_fits(self, view: RequestView) -> Refusal | None:
        """Replicas are there, and none of them could ever hold it."""
        known = self._fleet.all()
        if not known or any(fits(one.view, view) for one in known):
            return None
        most = max(min(one.view.limits.max_model_len, one.view.limits.num_blocks * one.view.limits.block_size) for one in known)
        return Refusal(400, "never_fits", f"the prompt has {view.prompt_tokens} tokens, and with one to generate at most {most} fit")


def _queue_time(shed: Shed, slo_s: float, reason: str = "queue_time") -> Refusal:
    message = f"the predicted queue time of {shed.expected_s:.1f} s exceeds {slo_s:g} s"
    return Refusal(429, reason, message, shed.retry_after_s)
