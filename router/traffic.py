"""Every batch in flight and every attempt on a replica (pure). Attempts come and go by two doors: `_send` and `settle`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from replica.contract.messages import Bounce, BounceReason, FinishReason, TokenDelta
from router.dispatch import Bounds, Departure, Dispatch, Phase, Stream, tokens
from router.effects import CancelAttempt, Effect, Ended, Reject, Release, StreamEffect
from router.policy.fleet import Fleet
from router.policy.incarnation import Incarnation
from router.policy.known import Known
from router.policy.report_check import delta_fault
from router.policy.request_view import RequestView
from router.policy.retry_budget import RetryBudget
from router.policy.scoring import Choice
from router.ports import Batch
from router.reception import Admitted, Reception, Refused

UNBEGUN_MAX_S = 2.0  # a stream without a replica waits so long for one, then its client hears when to come again
BEGUN_MAX_S = 10.0  # one whose client has seen of it is worth more: a busy machine stands still for some seconds


@dataclass(slots=True)
class Tally:
    """What happened so far. In flight is never counted: it is the length of what holds it."""

    arrived: int = 0
    ended: int = 0  # rejected ones included
    rejected: dict[str, int] = field(default_factory=dict)  # by reason
    moves: int = 0
    retries: int = 0

    def turned_away(self, reason: str) -> None:
        """One was refused before it became a batch."""
        self.arrived += 1
        self.ended += 1
        self.rejected[reason] = self.rejected.get(reason, 0) + 1


class Traffic:
    def __init__(self, fleet: Fleet, reception: Reception, bounds: Bounds) -> None:
        self.tally = Tally()
        self._fleet = fleet
        self._reception = reception
        self._bounds = bounds
        self._retries = RetryBudget()
        self.dispatches: dict[int, Dispatch] = {}
        self.attempts: dict[int, tuple[Dispatch, Stream]] = {}
        self._adrift: dict[int, Dispatch] = {}  # may hold some that are no more; see place_adrift
        self._batches = 0
        self._last_attempt = 0

    def open(self, batch: Batch) -> Dispatch:
        self._batches += 1
        self.tally.arrived += 1
        self._retries.request()
        dispatch = Dispatch(self._batches, batch, self._bounds)
        self.dispatches[dispatch.batch_id] = dispatch
        return dispatch

    def answered(self, answer: Admitted | Refused, now: float) -> list[Effect]:
        """Reception has decided on a batch."""
        dispatch = self.dispatches[answer.batch_id]
        if isinstance(answer, Refused):
            refusal = answer.refusal
            return self.settle(dispatch.reject(refusal.status, refusal.reason, refusal.message, refusal.retry_after_s), now)
        first, *others = dispatch.streams
        effects = self._send(dispatch, first, answer.choice, now)
        for stream in others:
            effects += self._place(dispatch, stream, _pool(self._fleet, dispatch), now)
        return self.settle(effects, now)

    # --- what replicas say -------------------------------------------------------------------------------------------

    def accepted(self, incarnation: Incarnation, attempt: int, now: float) -> list[Effect]:
        dispatch, stream = self._of(attempt, incarnation)
        return self.settle(dispatch.accepted(stream.index, attempt), now) if dispatch is not None and stream is not None else []

    def deltas(self, known: Known, deltas: Sequence[TokenDelta], now: float) -> list[Effect]:
        """All of one frame, in order."""
        effects: list[Effect] = []
        incarnation = known.view.incarnation
        for delta in deltas:
            found = self.attempts.get(delta.attempt)
            if found is None or found[1].incarnation != incarnation:
                continue
            dispatch, stream = found
            emit = tokens(dispatch, stream, delta)
            if emit is not None:
                effects.append(emit)
            else:
                effects += self._delta(known, dispatch, stream, delta, now)
        return effects

    def _delta(self, known: Known, dispatch: Dispatch, stream: Stream, delta: TokenDelta, now: float) -> list[Effect]:
        """Of a stream that is on that replica: more than tokens."""
        fault = delta_fault(delta)
        if fault is not None:  # its tokens are good
            self._fleet.lies.note(fault)
            delta = msgspec.structs.replace(delta, cached_tokens=None, waited_s=None)
        known.view.accept(delta.attempt)
        if delta.cached_tokens is not None or delta.waited_s is not None:
            self._fleet.first_delta(known.view.incarnation, delta, now)
            queue_time_s = None if delta.waited_s is None else stream.queued_s + delta.waited_s
            self._reception.decisions.outcome(dispatch.batch_id, queue_time_s, now - dispatch.batch.arrival_s, delta.cached_tokens)
        effects = dispatch.delta(stream.index, delta, now)
        if delta.finish in (FinishReason.STOP, FinishReason.LENGTH):
            self._fleet.output_length.observe(len(stream.emitted))
        return self.settle(effects, now)

    def bounced(self, incarnation: Incarnation, bounce: Bounce, now: float) -> list[Effect]:
        """Back-pressure or a client's error: never a fault of the replica."""
        dispatch, stream = self._of(bounce.attempt, incarnation)
        if dispatch is None or stream is None:
            return []
        known = self._fleet.get(incarnation)
        if bounce.reason is BounceReason.DRAINING and known is not None:
            self._fleet.drain(known, now)
        effects = self.settle(dispatch.depart(stream.index, Departure.BOUNCED, now), now)
        if stream.phase is not Phase.ADRIFT:
            return effects
        if bounce.reason in (BounceReason.NEVER_FITS, BounceReason.BAD_REQUEST):
            message = bounce.message or "no replica can hold this request"
            return effects + self.settle(dispatch.fail(stream.index, 400, bounce.reason.value, message), now)
        others = [one for one in _pool(self._fleet, dispatch) if one.view.incarnation != incarnation]
        if not dispatch.yielded and not (others and self._retries.take()):
            refusal = self._reception.full(batch_view(dispatch.batch), now)
            failed = dispatch.fail(stream.index, refusal.status, refusal.reason, refusal.message, refusal.retry_after_s)
            return effects + self.settle(failed, now)
        self.tally.retries += 1
        return effects + self.settle(self._place(dispatch, stream, others, now), now)

    def depart_all(self, incarnation: Incarnation, why: Departure, now: float) -> list[Effect]:
        """Every stream leaves the replica; `place_adrift` finds them others."""
        effects: list[Effect] = []
        for dispatch, stream in tuple(self.attempts.values()):
            if stream.incarnation == incarnation:
                self.tally.moves += 1
                effects += self.settle(dispatch.depart(stream.index, why, now), now)
        return effects

    def streams_on(self, incarnation: Incarnation) -> int:
        return sum(stream.incarnation == incarnation for _, stream in self.attempts.values())

    # --- streams without a replica -----------------------------------------------------------------------------------

    @property
    def adrift(self) -> bool:
        return any(stream.phase is Phase.ADRIFT for dispatch in self._adrift.values() for stream in dispatch.streams)

    def place_adrift(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if not self._adrift:
            return effects
        for dispatch in tuple(self._adrift.values()):
            for stream in dispatch.unplaced():
                if now >= stream.retry_s:
                    effects += self.settle(self._place(dispatch, stream, _pool(self._fleet, dispatch), now), now)
            if not dispatch.unplaced():
                self._adrift.pop(dispatch.batch_id, None)
        return effects

    def give_up_adrift(self, now: float, pause_s: float = 0.0) -> list[Effect]:
        """Nobody took them in time. `pause_s`: the router itself has just stood still for so long, nobody waited meanwhile."""
        effects: list[Effect] = []
        for dispatch in tuple(self._adrift.values()):
            for stream in dispatch.unplaced():
                stream.adrift_s += pause_s
                if now - stream.adrift_s >= (BEGUN_MAX_S if dispatch.yielded else UNBEGUN_MAX_S):
                    refusal = self._reception.no_replica()
                    effects += self.settle(dispatch.fail(stream.index, 503, refusal.reason, refusal.message, refusal.retry_after_s), now)
        return effects

    # --- within ------------------------------------------------------------------------------------------------------

    def _of(self, attempt: int, incarnation: Incarnation) -> tuple[Dispatch, Stream] | tuple[None, None]:
        """Whose it is; nobody's, if it has left that incarnation."""
        found = self.attempts.get(attempt)
        return found if found is not None and found[1].incarnation == incarnation else (None, None)

    def _place(self, dispatch: Dispatch, stream: Stream, candidates: Sequence[Known], now: float) -> list[StreamEffect]:
        """A stream that was admitted goes where its first token comes soonest; nowhere: it stays adrift."""
        choice = self._reception.place(stream_view(stream), candidates, now)
        if choice is not None:
            return self._send(dispatch, stream, choice, now)
        if dispatch.batch_id not in self._adrift:
            self._adrift[dispatch.batch_id] = dispatch
        if stream.phase is Phase.QUEUED and stream.adrift_s == 0.0:
            stream.adrift_s = now
        return []

    def _send(self, dispatch: Dispatch, stream: Stream, choice: Choice, now: float) -> list[StreamEffect]:
        known = self._fleet.get(choice.incarnation)
        assert known is not None, "the choice is among the candidates"
        self._last_attempt += 1
        attempt = self._last_attempt
        effects = dispatch.send(stream.index, choice.incarnation, attempt, now)
        dispatch.fingerprint = known.view.fingerprint
        self.attempts[attempt] = (dispatch, stream)
        prediction = self._fleet.lease(choice.incarnation, attempt, stream_view(stream), choice.forecast, now)
        stream.predicted = prediction.after(stream.queued_s)
        return effects

    def settle(self, effects: Iterable[StreamEffect], now: float) -> list[Effect]:
        """Take what is for this object: leases end, batches leave. The rest is for the shell."""
        outward: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Release):
                dispatch, stream = self.attempts.pop(effect.attempt)
                self._fleet.release(effect.incarnation, effect.attempt, now)
                if stream.phase is Phase.ADRIFT:
                    self._adrift[dispatch.batch_id] = dispatch
                continue
            if isinstance(effect, CancelAttempt) and self._fleet.get(effect.incarnation) is None:
                continue
            if isinstance(effect, Reject):
                self.tally.rejected[effect.reason] = self.tally.rejected.get(effect.reason, 0) + 1
            if isinstance(effect, Ended):
                self.tally.ended += 1
                del self.dispatches[effect.batch_id]
                self._adrift.pop(effect.batch_id, None)
                self._reception.forget(effect.batch_id)
            outward.append(effect)
        return outward


def _pool(fleet: Fleet, dispatch: Dispatch) -> list[Known]:
    return [known for known in fleet.routable() if known.view.fingerprint == dispatch.fingerprint]


def batch_view(batch: Batch) -> RequestView:
    """All choices, before anything of them was sent."""
    first = batch.requests[0]
    prompts = {id(one.prompt_ids): one for one in batch.requests}  # choices of one prompt share its tuple
    lengths = [len(one.prompt_ids) + len(one.emitted_ids) for one in batch.requests]
    return RequestView(
        prompt_tokens=lengths[0],
        block_keys=first.block_keys,
        max_tokens=first.sampling.max_tokens,
        choices=len(batch.requests),
        prompts=len(prompts),
        other_tokens=sum(len(one.prompt_ids) for one in prompts.values()) - len(first.prompt_ids),
        total_tokens=sum(lengths),
        longest_tokens=max(lengths),
        request_class=first.request_class,
        tenant=first.tenant,
        priority=first.priority,
    )


def stream_view(stream: Stream) -> RequestView:
    """One choice, as its next attempt would send it."""
    request = stream.request
    emitted = len(request.emitted_ids) + len(stream.emitted)
    return RequestView(
        prompt_tokens=len(request.prompt_ids) + emitted,
        block_keys=request.block_keys,
        max_tokens=max(0, request.sampling.max_tokens - emitted),
        request_class=request.request_class,
        tenant=request.tenant,
        priority=request.priority,
    )
