"""An admitted request while it runs: Deltas from the backend in, pieces of text out, every one of them on the record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import structlog

from replica.contract.messages import FinishReason
from router.api.answer import Usage
from router.api.choice import Choice, ChoiceOptions, Piece
from router.api.context import Context
from router.api.errors import ApiError, from_rejected
from router.api.plain_events import PlainEvents
from router.api.record import Record
from router.ports import Delta, Rejected, Session

_log = structlog.get_logger()


class Event(msgspec.Struct, frozen=True, gc=False):
    """A Delta and what became of it. `first` marks a choice's first one."""

    delta: Delta
    piece: Piece
    first: bool


class Run:
    """Call next() until it is over, or take() whenever `listen` says so. Both raise ApiError when the request as a whole has failed.

    close() in any case.
    """

    __slots__ = ("_begun", "_choices", "_context", "_gap", "_n", "_open", "_record", "_session", "usage")

    def __init__(self, context: Context, session: Session, options: ChoiceOptions, record: Record, n: int) -> None:
        self._context = context
        self._session = session
        self._record = record
        self._n = n
        self._choices = [Choice(options) for _ in range(record.choices)]
        self._begun = [False] * record.choices
        self._open = record.choices
        self._gap = context.metrics.gap
        self.usage = Usage(record)

    @property
    def is_over(self) -> bool:
        """Every choice has finished."""
        return not self._open

    @property
    def choices(self) -> int:
        return len(self._choices)

    def now(self) -> float:
        """Seconds, of the router's monotonic clock."""
        return self._context.clock()

    async def next(self) -> Sequence[Delta]:
        """All that have come, at least one."""
        try:
            return await self._session.__anext__()
        except Exception as error:
            raise _no_more(error) from error

    def listen(self, call: Callable[[], None]) -> None:
        """`call` is called in each turn of the loop in which something has come."""
        self._session.listen(call)

    def take(self) -> Sequence[Delta]:
        """All that have come, if any."""
        try:
            return self._session.take()
        except Exception as error:
            raise _no_more(error) from error

    def events(self, deltas: Sequence[Delta]) -> Iterator[Event]:
        """What becomes of Deltas that came together. What was yielded before it raises ApiError is good."""
        now_s = self.now()
        for delta in deltas:
            event = self.event(delta, now_s)
            if event is not None:
                yield event

    def event(self, delta: Delta, now_s: float) -> Event | None:
        """None: its choice has finished. Raises ApiError."""
        choice = self._choices[delta.index]
        return None if choice.finished else self._take(choice, delta, now_s)

    def plain(self, plain: PlainEvents, deltas: Sequence[Delta], start: int, now_s: float) -> list[bytes]:
        """Rendered events of those Deltas from `start` on that are plain text; as much is on the record as `event` leaves there.

        None of a choice that has not begun: its first token is more than that. Raises ApiError.
        """
        choice = self._choices[plain.index]
        texts = choice.texts if plain.index in self._record.last_s else None
        if texts is None:
            return []
        try:
            events = plain.of(deltas, start, texts)
        except Exception as error:
            raise _no_text() from error
        if events:
            choice.completion_tokens += len(events)
            self._record.completion_tokens += len(events)
            self._gap(self._record.saw_tokens(plain.index, now_s))
            if len(events) > 1:
                self._gap(0.0, len(events) - 1)
        return events

    def close(self) -> None:
        self._session.close()

    def _take(self, choice: Choice, delta: Delta, now_s: float) -> Event:
        if delta.finish is not None and delta.finish not in (FinishReason.STOP, FinishReason.LENGTH):
            raise _failure(delta)
        index = delta.index
        first = not self._begun[index]
        self._observe(delta, first, now_s)
        before = choice.completion_tokens
        try:
            piece = choice.push(delta)
        except Exception as error:
            raise _no_text() from error
        self._record.completion_tokens += choice.completion_tokens - before
        if piece.finish is not None:
            self._open -= 1
            self._record.finish_reasons.append(piece.finish)
            if delta.finish is None:
                self._session.stop(index)
        self._begun[index] = True
        return Event(delta, piece, first)

    def _observe(self, delta: Delta, first: bool, now_s: float) -> None:
        record = self._record
        if first and delta.cached_tokens is not None and delta.index % self._n == 0:
            record.cached_tokens += delta.cached_tokens
        waiting = record.first_token_s is None
        gap_s = record.saw(delta, now_s)
        if gap_s is not None:
            self._gap(gap_s)
        elif waiting and record.first_token_s is not None:
            self._context.metrics.first_token(record, now_s)


def _no_more(error: Exception) -> ApiError:
    """Why the backend gives nothing more."""
    if isinstance(error, StopAsyncIteration):
        return ApiError(500, "the answer ended early", code="generation_failed")
    if isinstance(error, Rejected):
        return from_rejected(error)
    _log.exception("the backend failed under request")
    return ApiError(500, "the request failed inside the server", code="internal_error")


def _no_text() -> ApiError:
    """For a fault of ours, which is logged."""
    _log.exception("a token could not be turned into text")
    return ApiError(500, "the answer could not be turned into text", code="internal_error")


def _failure(delta: Delta) -> ApiError:
    if delta.finish is FinishReason.TIMEOUT:
        return ApiError(429, "the request waited too long for its first token", code="queue_time", retry_after_s=1.0)
    if delta.finish is FinishReason.ABORT:
        return ApiError(503, "the request was cancelled by the server", code="aborted", retry_after_s=1.0)
    if delta.failure is not None:
        failure = delta.failure
        return from_rejected(Rejected(failure.status, failure.reason, delta.error, failure.retry_after_s))
    return ApiError(500, delta.error or "the request failed while it was generated", code="generation_failed")
