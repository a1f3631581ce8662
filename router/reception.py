"""Arrivals: admitted, made to wait, or refused (pure; DESIGN §7). Holds the queue of batches that wait at the router."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import msgspec

from router.config import RouterConfig
from router.policy.admission import Admission, Admit, Outlay, Overrun, Promise, Shed
from router.policy.classes import Classes, ServiceClass, Slo, Terms
from router.policy.decisions import Decisions
from router.policy.fleet import Fleet, backlog_s
from router.policy.foresight import Foresight
from router.policy.known import Known
from router.policy.making_room import make_room
from router.policy.policies import policy_named
from router.policy.queue import Waiting, WaitQueue
from router.policy.request_view import RequestView
from router.policy.scoring import Choice
from router.policy.standing import Standing
from router.policy.tenants import Tenant, Tenants
from router.ports import Batch
from router.refusal import Refusal, never_fits, too_late, unknown_class

NO_REPLICA_RETRY_S = 2.0
EXACT_MAX = 64  # batches that a sweep looks at closely
OTHERS_MAX = 8  # batches that are looked at when the head finds no place
DISPLACED = "the router's queue is full, and others have had less than their share"
LEAST = RequestView(prompt_tokens=1, block_keys=(), max_tokens=1)  # no request waits less
LEAST_IN_ORDER = msgspec.structs.replace(LEAST, in_order=True)  # nor one that is too long to pass others


class Admitted(msgspec.Struct, frozen=True, gc=False):
    batch_id: int
    choice: Choice


class Refused(msgspec.Struct, frozen=True, gc=False):
    batch_id: int
    refusal: Refusal


class Queued(msgspec.Struct, frozen=True, gc=False):
    batch_id: int
    displaced: tuple[Refused, ...] = ()  # they had more than their share of the queue


Answer = Admitted | Refused | Queued


class Reception:
    def __init__(self, config: RouterConfig, fleet: Fleet, seed: int) -> None:
        self._fleet = fleet
        self._classes = Classes(config.service_classes())
        self.tenants = Tenants(
            {name: Tenant(one.weight, one.requests_max, one.tokens_max) for name, one in config.tenants.items()},
        )
        self._standing = Standing(self._classes, self.tenants.weight)
        self._admission = Admission(policy_named(config.policy, seed), config.admission_quantile, seed)
        self.queue = WaitQueue(config.queue_depth_max, config.queue_tokens_max, self.tenants.weight)
        self.decisions = Decisions(config.debug_decisions)
        self.foresight = Foresight()
        self._passed_over = 0  # of those behind a head without a place, how many were looked at last time

    def arrive(self, batch_id: int, batch: Batch, view: RequestView, now: float) -> Answer:
        answer = self._arrive(batch_id, batch, view, now)
        if not (isinstance(answer, Refused) and answer.refusal.reason in ("tenant_limit", "unknown_class")):
            self.tenants.enter(batch_id, view)
        return answer

    def _arrive(self, batch_id: int, batch: Batch, view: RequestView, now: float) -> Answer:
        service = self._classes.find(view.request_class)
        if service is None:
            return Refused(batch_id, unknown_class(self._classes))
        self._standing.seen(service, view.tenant, now)
        limit = self.tenants.limit(view.tenant, view)
        if limit is not None:
            return Refused(batch_id, self._over_limit(limit, now))
        candidates = self._fleet.routable()
        impossible = never_fits(self._fleet.all(), view)
        if impossible is not None:
            return Refused(batch_id, impossible)
        outlays = self._fleet.outlays(view, candidates, now)
        if not outlays:
            return Refused(batch_id, self.no_replica())
        slo = self._classes.slo(batch.terms)
        self._standing.asks(slo, view.prompt_tokens, now)
        promise = self._promise(service, view.tenant, view.prompt_tokens, slo, batch.arrival_s, now)
        if len(outlays) < len(candidates):  # only a sample was asked: who finds no place in it asks everyone
            choice = self._admission.admit(view, promise, outlays, now)
            if choice is not None:
                return self._admitted(batch_id, batch.request_id, view, choice, outlays, now)
            outlays = self._fleet.outlays(view, candidates, now, sample=False)
        verdict = self._admission.judge(view, promise, outlays, now)
        if isinstance(verdict, Admit):
            return self._admitted(batch_id, batch.request_id, view, verdict.choice, outlays, now)
        if isinstance(verdict, Shed):
            refusal = too_late(verdict)
            self.decisions.refused(batch.request_id, view, refusal.reason, outlays, now)
            return Refused(batch_id, refusal)
        waiting = Waiting(batch_id, view, batch.arrival_s, slo, verdict.service_s, verdict.new_tokens, verdict.prefill_s, batch.request_id)
        displaced = make_room(self.queue, self._standing, self._classes, waiting, now)
        if displaced is None:
            shed = self._admission.shed(promise, outlays, now)
            self.decisions.refused(batch.request_id, view, "queue_full", outlays, now)
            return Refused(batch_id, Refusal(429, "queue_full", "the router's queue is full", shed.retry_after_s))
        refused: list[Refused] = []
        for each in displaced:
            self.queue.remove(each.batch_id)
            shed = self._admission.shed(promise, outlays, now)
            refused.append(Refused(each.batch_id, Refusal(429, "queue_full", DISPLACED, shed.retry_after_s)))
        self.queue.add(waiting)
        return Queued(batch_id, tuple(refused))

    def foresee(self, arrival_s: float, terms: Terms | None, about_tokens: int, now: float) -> Refusal | None:
        """Would even the least request be shed? Prompts hardly change the wait for a first step: this spares reading most of them.

        None where no replica is known to be there, or one could keep the promise for something: `arrive` decides.
        """
        terms = terms or Terms()
        service = self._classes.find(terms.request_class)
        if service is None:
            return unknown_class(self._classes)
        slo = self._classes.slo(terms)
        self._standing.seen(service, terms.tenant, now)
        least = self._least(about_tokens, now)
        overrun = self.foresight.find(terms, least.in_order, arrival_s, now)
        if overrun is None:
            overrun = self._overrun(service, terms.tenant, slo, least, about_tokens, arrival_s, now)
            if overrun is None:
                return None
            self.foresight.keep(terms, least.in_order, arrival_s, overrun, now)
        else:
            self._standing.asks(slo, about_tokens, now)
        return too_late(self._admission.turn_away(overrun, now, tokens=about_tokens))

    def _least(self, about_tokens: int, now: float) -> RequestView:
        """What waits no longer than a prompt of about so many tokens: where half a step does not hold what no cache has of them, by
        what others have found there lately, it passes nobody."""
        candidates = self._fleet.routable()
        half = candidates[0].view.limits.max_num_batched_tokens // 2 if candidates else math.inf
        is_long = about_tokens > half and about_tokens - max(0.0, -self._fleet.hits.least(now)) > half
        return LEAST_IN_ORDER if is_long else LEAST

    def _overrun(
        self, service: ServiceClass, tenant: str, slo: Slo, least: RequestView, about_tokens: int, arrival_s: float, now: float
    ) -> Overrun | None:
        """Of the least request; None where it is not hopeless: one replica with room says all, and most often the first one has."""
        candidates = self._fleet.routable()
        if not candidates or any(one.view.is_empty for one in candidates):
            return None
        promise = self._promise(service, tenant, least.prompt_tokens, slo, arrival_s, now)
        outlays = self._fleet.outlays(least, candidates[:1], now)
        if not self._admission.is_hopeless(promise, outlays, now):
            return None
        if len(candidates) > 1:
            outlays = self._fleet.outlays(least, candidates, now)  # of many a sample
            if not self._admission.is_hopeless(promise, outlays, now):
                return None
        if len(outlays) < len(candidates):
            outlays = self._fleet.outlays(least, candidates, now, sample=False)
            if not outlays or not self._admission.is_hopeless(promise, outlays, now):
                return None
        self._standing.asks(slo, about_tokens, now)
        return self._admission.overrun(promise, outlays, now)

    def head(self, candidates: Sequence[Known], now: float) -> Admitted | None:
        """Judge the head against replicas whose state is new. Whoever is admitted leaves the queue.

        A head that a replica does not take though it is about to run dry must wait for reasons of its own, not for its turn:
        such a replica is offered to others meanwhile, a few at a time.
        """
        if not len(self.queue):
            return None
        behind = self._standing.behind(now)
        head = self.queue.head(behind, lambda tenant: self._standing.exceeds(tenant, now))
        if head is None:
            return None
        admitted = self._from_queue(head, candidates, now)
        if admitted is not None or len(self.queue) == 1:
            return admitted
        least = self._fleet.outlays(LEAST_IN_ORDER, candidates, now)
        dry = [one.candidate for one in least if self._admission.is_about_dry(one, now)]
        if not dry:
            return None
        known = [found for one in dry if (found := self._fleet.get(one.incarnation)) is not None]
        tpot_s = min(one.forecast.tpot_s for one in dry)
        others = self.queue.others(head, behind, lambda tenant: self._standing.exceeds(tenant, now), tpot_s)
        asked = 0
        for one in islice(others, self._passed_over, self._passed_over + OTHERS_MAX):
            asked += 1
            admitted = self._from_queue(one, known, now)
            if admitted is not None:
                return admitted
        self._passed_over = self._passed_over + asked if asked == OTHERS_MAX else 0
        return None

    def _from_queue(self, one: Waiting, candidates: Sequence[Known], now: float) -> Admitted | None:
        outlays = self._fleet.outlays(one.view, candidates, now)
        if not outlays:
            return None
        view = one.view
        depth = self._standing.depth(self._classes[view.request_class], one.slo, view.prompt_tokens, view.tenant, now)
        promise = Promise(one.slo, max(0.0, now - one.arrival_s), 0.0, depth.depth_s, depth.is_lean)
        choice = self._admission.admit(view, promise, outlays, now)
        if choice is None:
            return None
        self.queue.remove(one.batch_id, served=True)
        return self._admitted(one.batch_id, one.request_id, view, choice, outlays, now)

    def sweep(self, now: float) -> list[Refused]:
        """Who has become hopeless leaves. Cheap for all, exact for those it seems to concern. To be called every 25 ms or so."""
        if not len(self.queue):
            return []
        candidates = self._fleet.routable()
        if not candidates:
            gone = [Refused(waiting.batch_id, self.no_replica()) for waiting in self.queue]
            for refusal in gone:
                self.queue.remove(refusal.batch_id)
            return gone
        outlays = self._fleet.outlays(LEAST, candidates, now, sample=False)
        least_s, doubt = self._admission.least_s(outlays, now)
        head = self.queue.head()
        tpot_s = min(one.candidate.forecast.alone_tpot_s / one.waits.doubt for one in outlays)
        refused: list[Refused] = []
        asked = 0
        for one, ahead_s in self.queue.with_ahead_s():
            start_s = now + (ahead_s + least_s) / doubt
            is_late = (
                start_s > one.arrival_s + one.slo.queue_time_s
                or start_s + one.prefill_s / doubt > one.arrival_s + one.slo.ttft_within_s(one.new_tokens)
            )
            is_too_fast = one.slo.tpot_s is not None and one.slo.tpot_s < tpot_s
            if not (is_late or is_too_fast or one is head):
                continue
            asked += 1
            if asked > EXACT_MAX:
                break
            promise = Promise(one.slo, now - one.arrival_s, ahead_s)
            own = self._fleet.outlays(one.view, candidates, now)
            if not own or self._admission.is_hopeless(promise, own, now):
                self.queue.remove(one.batch_id)
                why = too_late(self._admission.shed(promise, own, now), "_waited") if own else self.no_replica()
                self.decisions.refused(one.request_id, one.view, why.reason, own, now)
                refused.append(Refused(one.batch_id, why))
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
        slo = self._classes[view.request_class].slo
        shed = self._admission.shed(Promise(slo, 0.0, self.queue.work_s), outlays, now)
        return Refusal(429, "queue_full", "the replicas' queues are full", shed.retry_after_s)

    def forget(self, batch_id: int) -> None:
        """The batch has ended, however. Idempotent."""
        self.queue.remove(batch_id)
        self.tenants.leave(batch_id)
        self.decisions.forget(batch_id)

    def no_replica(self) -> Refusal:
        return Refusal(503, "no_replica", "no healthy replica", self._admission.jittered(NO_REPLICA_RETRY_S))

    def _over_limit(self, limit: str, now: float) -> Refusal:
        retry_s = self._admission.jittered(max(1.0, backlog_s(self._fleet, now)))
        return Refusal(429, "tenant_limit", f"this key's tenant has reached its {limit} in flight", retry_s)

    def _promise(self, service: ServiceClass, tenant: str, tokens: int, slo: Slo, arrival_s: float, now: float) -> Promise:
        ahead_s = self.queue.ahead_s(service.name, tenant, arrival_s + slo.time_s(tokens)) if len(self.queue) else 0.0
        depth = self._standing.depth(service, slo, tokens, tenant, now)
        return Promise(slo, max(0.0, now - arrival_s), ahead_s, depth.depth_s, depth.is_lean)

    def _admitted(
        self, batch_id: int, request_id: str, view: RequestView, choice: Choice, outlays: Sequence[Outlay], now: float
    ) -> Admitted:
        self._standing.charge(view.request_class, view.tenant, choice.forecast.new_tokens + view.other_tokens, now)
        self.decisions.admitted(batch_id, request_id, view, choice, outlays, now)
        return Admitted(batch_id, choice)
