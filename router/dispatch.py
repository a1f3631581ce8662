"""One client request's life: each of its choices is a stream that may live on several replicas, one after the other.

A state machine: events in, effects out, no I/O, no clock. An attempt is fenced by its number: whatever a replica says
about an attempt that is not the stream's present one is dropped, so no token is lost or doubled by a move. The new
attempt goes on from prompt + emitted tokens. Each choice has exactly one outcome.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec

from replica.contract.messages import FinishReason, GenerateRequest, TokenDelta
from router.effects import CancelAttempt, Emit, Ended, Opened, Reject, Release, StreamEffect, Submit
from router.policy.incarnation import Incarnation
from router.policy.prediction import Prediction
from router.ports import Batch, Delta, Failure


class Phase(enum.Enum):
    __hash__ = object.__hash__  # of an Enum it is written in Python, and each move asks for it twice

    QUEUED = "queued"  # at the router, never sent
    SENT = "sent"  # dispatched, not yet confirmed by the replica
    HELD = "held"  # in an engine
    ADRIFT = "adrift"  # its replica is lost, leaving, or did not take it: it needs another
    DONE = "done"


_LEGAL: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.SENT, Phase.DONE}),
    Phase.SENT: frozenset({Phase.HELD, Phase.ADRIFT, Phase.DONE}),
    Phase.HELD: frozenset({Phase.ADRIFT, Phase.DONE}),
    Phase.ADRIFT: frozenset({Phase.SENT, Phase.DONE}),
    Phase.DONE: frozenset(),
}
_PLACED = frozenset({Phase.SENT, Phase.HELD})
LOST_RETRY_S = 2.0  # what Retry-After says of a request that was given up: replicas are being replaced
BOUNCE_DELAY_S = 0.25  # doubled with every bounce: a queue that is full now is full for the next frame too


class Departure(enum.Enum):
    """Why a stream leaves its replica."""

    LOST = "lost"  # it died: counts against the request too (poison guard)
    STALLED = "stalled"  # as likely the machine's fault: counts once less
    LEAVING = "leaving"  # drained, or aborted by the replica itself
    BOUNCED = "bounced"  # not taken: no move, a retry


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one request."""

    moves_max: int = 3  # of a stream, to another replica
    deaths_max: int = 2  # of replicas under it, before it is given up; or so many deaths and stalls and one more
    bounces_max: int = 3


@dataclass(slots=True)
class Stream:
    """One choice. `request` never changes; what an attempt sends is derived from it and `emitted`."""

    index: int
    request: GenerateRequest
    phase: Phase = Phase.QUEUED
    attempt: int = 0
    incarnation: Incarnation | None = None
    emitted: list[int] = field(default_factory=list)
    facts_told: bool = False
    queued_s: float = 0.0  # router time before the present attempt was sent
    moves: int = 0
    bounces: int = 0
    adrift_s: float = 0.0  # when it came adrift
    retry_s: float = 0.0  # whoever has bounced it is not asked again before
    predicted: Prediction | None = None  # of the present attempt

    def move(self, phase: Phase) -> None:
        if phase not in _LEGAL[self.phase]:
            raise RuntimeError(f"choice {self.index} of {self.request.request_id}: {self.phase.value} → {phase.value} is not a legal move")
        self.phase = phase


class Dispatch:
    """All choices of one batch."""

    def __init__(self, batch_id: int, batch: Batch, bounds: Bounds) -> None:
        self.batch_id = batch_id
        self.batch = batch
        self.streams = tuple(Stream(index, request) for index, request in enumerate(batch.requests))
        self._bounds = bounds
        self._lost: dict[Incarnation, Departure] = {}
        self._opened = False
        self.fingerprint = ""  # of the pool it started in: it never crosses to another
        self.yielded = False  # something went to the client: no rejection any more
        self.ended = False

    # --- placement ---------------------------------------------------------------------------------------------------

    def send(self, index: int, incarnation: Incarnation, attempt: int, now: float) -> list[StreamEffect]:
        """The policy chose a replica for a stream that is queued or adrift."""
        stream = self.streams[index]
        stream.move(Phase.SENT)
        stream.attempt, stream.incarnation = attempt, incarnation
        stream.queued_s = max(0.0, now - self.batch.arrival_s)
        request = stream.request
        sampling = request.sampling
        if stream.facts_told and sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        left_s = None if request.deadline_s is None or stream.emitted else request.deadline_s - stream.queued_s
        sent = msgspec.structs.replace(
            request,
            attempt=attempt,
            sampling=sampling,
            emitted_ids=request.emitted_ids + tuple(stream.emitted),
            queued_s=stream.queued_s,
            deadline_s=left_s,
        )
        return [Submit(incarnation, sent)]

    def unplaced(self) -> tuple[Stream, ...]:
        """Streams that need a replica."""
        return tuple(stream for stream in self.streams if stream.phase in (Phase.QUEUED, Phase.ADRIFT))

    # --- what replicas say -------------------------------------------------------------------------------------------

    def accepted(self, index: int, attempt: int) -> list[StreamEffect]:
        stream = self.streams[index]
        if stream.attempt != attempt or stream.phase is not Phase.SENT:
            return []
        stream.move(Phase.HELD)
        return self._open()

    def delta(self, index: int, delta: TokenDelta, now: float) -> list[StreamEffect]:
        """New tokens, or the end, of an attempt; of an old attempt: nothing."""
        stream = self.streams[index]
        if stream.attempt != delta.attempt or stream.phase not in _PLACED:
            return []
        effects = self.accepted(index, delta.attempt)
        if delta.finish is FinishReason.ABORT:  # not asked for: the replica itself gave it up
            return effects + self.depart(index, Departure.LEAVING, now)
        facts = not stream.facts_told and (delta.cached_tokens is not None or delta.waited_s is not None or bool(delta.prompt_logprobs))
        if not (delta.token_ids or delta.finish or facts):
            return effects
        stream.emitted.extend(delta.token_ids)
        stream.facts_told = stream.facts_told or facts
        told = Delta(
            index=index,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            prompt_logprobs=delta.prompt_logprobs if facts else (),
            cached_tokens=delta.cached_tokens if facts else None,
            queue_time_s=stream.queued_s + delta.waited_s if facts and delta.waited_s is not None else None,
            finish=delta.finish,
            stop_id=delta.stop_id,
            error=delta.error,
            predicted=stream.predicted if facts else None,
        )
        if delta.finish is None:
            return [*effects, self._emit(told)]
        return effects + self._finish(stream, told, cancel=False)

    # --- trouble -----------------------------------------------------------------------------------------------------

    def depart(self, index: int, why: Departure, now: float) -> list[StreamEffect]:
        """The stream leaves its replica unfinished; it comes adrift, or ends if its bounds are used up."""
        stream = self.streams[index]
        if stream.phase not in _PLACED:
            return []
        assert stream.incarnation is not None
        effects = self._leave(stream, cancel=why is not Departure.BOUNCED)
        if why is Departure.LOST or why is Departure.STALLED:
            self._lost[stream.incarnation] = why
        if why is Departure.BOUNCED:
            stream.bounces += 1
            stream.retry_s = now + BOUNCE_DELAY_S * 2.0 ** (stream.bounces - 1)
        else:
            stream.moves += 1
        stream.move(Phase.ADRIFT)
        stream.adrift_s = now
        if len(stream.emitted) + len(stream.request.emitted_ids) >= stream.request.sampling.max_tokens:
            return effects + self._finish(stream, Delta(index, finish=FinishReason.LENGTH), cancel=False)
        if self._is_suspect():
            message = f"{len(self._lost)} replicas were lost while they served this request"
            return effects + self.fail(index, 503, "replicas_lost", message, LOST_RETRY_S)
        if stream.moves > self._bounds.moves_max:
            message = f"this request was moved {self._bounds.moves_max} times and still not finished"
            return effects + self.fail(index, 503, "moves", message, LOST_RETRY_S)
        if stream.bounces > self._bounds.bounces_max:
            return effects + self.fail(index, 429, "queue_full", "no replica took this request", 1.0)
        return effects

    def _is_suspect(self) -> bool:
        deaths = sum(why is Departure.LOST for why in self._lost.values())
        return deaths >= self._bounds.deaths_max or len(self._lost) > self._bounds.deaths_max

    def fail(self, index: int, status: int, reason: str, message: str, retry_after_s: float | None = None) -> list[StreamEffect]:
        """Before the first emission the whole batch is rejected; afterwards this choice ends with an error."""
        stream = self.streams[index]
        if stream.phase is Phase.DONE:
            return []
        if self.yielded:
            failure = Failure(status, reason, retry_after_s)
            return self._finish(stream, Delta(index, finish=FinishReason.ERROR, error=message, failure=failure), cancel=True)
        return self.reject(status, reason, message, retry_after_s)

    def reject(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> list[StreamEffect]:
        """The whole batch, of which nothing was emitted."""
        assert not self.yielded
        effects = self.close()[:-1]
        return [*effects, Reject(self.batch_id, status, reason, message, retry_after_s), Ended(self.batch_id)]

    # --- what the client wants ---------------------------------------------------------------------------------------

    def stop(self, index: int) -> list[StreamEffect]:
        """No more of this choice is wanted; nothing of it is told any more."""
        stream = self.streams[index]
        if stream.phase is Phase.DONE:
            return []
        effects = self._leave(stream, cancel=True)
        stream.move(Phase.DONE)
        return effects + self._open() + self._end()

    def close(self) -> list[StreamEffect]:
        """Nothing is wanted any more. Idempotent; ends with Ended the first time."""
        if self.ended:
            return []
        self._opened = True  # nobody waits for it
        effects: list[StreamEffect] = []
        for stream in self.streams:
            effects += self.stop(stream.index)
        return effects

    # --- doors -------------------------------------------------------------------------------------------------------

    def _leave(self, stream: Stream, *, cancel: bool) -> list[StreamEffect]:
        """The one way off a replica."""
        if stream.phase not in _PLACED:
            return []
        assert stream.incarnation is not None
        release = Release(stream.incarnation, stream.attempt)
        return [release, CancelAttempt(stream.incarnation, stream.attempt)] if cancel else [release]

    def _finish(self, stream: Stream, told: Delta, *, cancel: bool) -> list[StreamEffect]:
        effects = self._leave(stream, cancel=cancel)
        stream.move(Phase.DONE)
        return [*effects, *self._open(), self._emit(told), *self._end()]

    def _emit(self, told: Delta) -> Emit:
        self.yielded = True
        return Emit(self.batch_id, told)

    def _open(self) -> list[StreamEffect]:
        if self._opened or any(stream.phase not in (Phase.HELD, Phase.DONE) for stream in self.streams):
            return []
        self._opened = True
        return [Opened(self.batch_id)]

    def _end(self) -> list[StreamEffect]:
        if self.ended or any(stream.phase is not Phase.DONE for stream in self.streams):
            return []
        self.ended = True
        return [Ended(self.batch_id)]


def tokens(dispatch: Dispatch, stream: Stream, delta: TokenDelta) -> Emit | None:
    """What `dispatch.delta` says of tokens and nothing else to a stream in an engine, as nearly all are: at a fraction of the cost.

    None: it is for `dispatch.delta`.
    """
    if (
        stream.phase is not Phase.HELD
        or stream.attempt != delta.attempt
        or delta.finish is not None
        or delta.waited_s is not None  # what only a first one carries
        or delta.cached_tokens is not None
        or delta.prompt_logprobs
        or not delta.token_ids
    ):
        return None
    stream.emitted.extend(delta.token_ids)
    dispatch.yielded = True
    return Emit(dispatch.batch_id, Delta(stream.index, delta.token_ids, delta.logprobs))
