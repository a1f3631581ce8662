"""An admitted request while it runs: Deltas from the backend in, pieces of text out, every one of them on the record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import structlog

from replica.contract.messages import FinishReason
from router.api.answer import Usage
from router.api.choice import Choice, ChoiceOptions, Piece
from router.api.context import Context
from router.api.errors import ApiError, from_rejected
from router.api.record import Record
from router.ports import Delta, Rejected, Session

_log = structlog.get_logger()


class Event(msgspec.Struct, frozen=True, gc=False):
    """A Delta and what became of it. `first` marks a choice's first one."""

    delta: Delta
    piece: Piece
    first: bool


class Run:
    """Call next() until it is over. Raises ApiError when the request as a whole has failed. close() in any case."""

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

    async def next(self) -> Sequence[Delta]:
        """All that have come, for `events`."""
        try:
            return await self._session.__anext__()
        except StopAsyncIteration:
            raise ApiError(500, "the answer ended early", code="generation_failed") from None
        except Rejected as rejected:
            raise from_rejected(rejected) from None
        except Exception as error:
            _log.exception("the backend failed under request")
            raise ApiError(500, "the request failed inside the server", code="internal_error") from error

    def events(self, deltas: Sequence[Delta]) -> Iterator[Event]:
        """What becomes of Deltas that came together. What was yielded before it raises ApiError is good."""
        now_s = self._context.clock()
        for delta in deltas:
            choice = self._choices[delta.index]
            if not choice.finished:
                yield self._take(choice, delta, now_s)

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
            _log.exception("a token could not be turned into text")
            raise ApiError(500, "the answer could not be turned into text", code="internal_error") from error
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


def _failure(delta: Delta) -> ApiError:
    if delta.finish is FinishReason.TIMEOUT:
        return ApiError(429, "the request waited too long for its first token", code="queue_time", retry_after_s=1.0)
    if delta.finish is FinishReason.ABORT:
        return ApiError(503, "the request was cancelled by the server", code="aborted", retry_after_s=1.0)
    if delta.failure is not None:
        failure = delta.failure
        return from_rejected(Rejected(failure.status, failure.reason, delta.error, failure.retry_after_s))
    return ApiError(500, delta.error or "the request failed while it was generated", code="generation_failed")
