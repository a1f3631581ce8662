"""The course of one generation request, the same for completions and chat: read, prepare, admit, answer, account."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
from starlette.types import Receive, Scope, Send

from router.api.answer import Renderer, WholeChoice
from router.api.body import ClientDisconnected
from router.api.choice import ChoiceOptions
from router.api.chunks import DONE, error_event
from router.api.context import Context
from router.api.delivery import Delivery
from router.api.disconnect import WhileConnected
from router.api.errors import ApiError, from_rejected
from router.api.header_fields import header_fields
from router.api.outbox import Outbox, StreamCut
from router.api.record import Outcome, Record
from router.api.rendering import not_rendered, rendered
from router.api.respond import respond, respond_error, start_event_stream
from router.api.run import Run
from router.api.submission import Arrival, Caller
from router.api.terms import class_is_in_body, read_terms
from router.ports import Batch, Rejected, Session

_log = structlog.get_logger()
BYTES_PER_TOKEN = 5  # of a body, about: of English as of lists of ids
CALLER_KEY = "rantang.caller"  # in the scope: set by the front
NOBODY = Caller()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request, ready for the backend."""

    batch: Batch
    renderer: Renderer
    options: ChoiceOptions
    n: int
    prompt_tokens: int
    stream: bool


class Endpoint(Protocol):
    """What completions and chat do differently."""

    path: str
    id_prefix: str

    def check(self, body: Mapping[str, Any]) -> Callable[[Arrival], Prepared]:
        """Validate on the loop; the result does the text work, on a thread. Both raise ApiError."""
        ...


class GenerateApp:
    """The ASGI app of one such endpoint."""

    def __init__(self, context: Context, endpoint: Endpoint) -> None:
        self._context = context
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._context
        headers = header_fields(scope)
        record = Record(self._endpoint.path, context.clock(), choices=1)
        span = context.tracing.begin(self._endpoint.path, headers)
        outcome: Outcome | None = None
        try:
            try:
                body = await context.intake.read(receive, headers)
                about_tokens = len(body) // BYTES_PER_TOKEN
                caller = scope.get(CALLER_KEY, NOBODY)
                record.terms = read_terms(headers, {}, caller, context.classes)
                waits_for_body = class_is_in_body(headers, body, context.classes)
                # Shed before a byte of the body is looked at: what load costs must not grow with what is asked.
                refusal = None if waits_for_body else context.backend.foresee(record.arrival_s, record.terms, about_tokens)
                if refusal is not None:
                    outcome = await self._turned_away(refusal, record, scope, send)
                    return
                taken = await context.intake.parse(body)
                del body
                is_short = taken.is_short
                job = self._endpoint.check(taken.fields)
                record.terms = read_terms(headers, taken.fields, caller, context.classes)
                del taken
                if waits_for_body and (refusal := context.backend.foresee(record.arrival_s, record.terms, about_tokens)) is not None:
                    outcome = await self._turned_away(refusal, record, scope, send)
                    return
                arrival = Arrival(
                    request_id=f"{self._endpoint.id_prefix}-{context.random_bits(128):032x}",
                    arrival_s=record.arrival_s,
                    caller=caller,
                    traceparent=span.traceparent,
                    terms=record.terms,
                )
                prepared = await context.pool.run(lambda: job(arrival), is_short=is_short)
            except ApiError as error:
                record.status, record.reason = error.status, error.code or ""
                context.metrics.invalid(error.status)
                await respond_error(scope, send, error)
                return
            except ClientDisconnected:
                return
            record.choices, record.prompt_tokens = len(prepared.batch.requests), prepared.prompt_tokens
            context.metrics.begin(record)
            outcome = Outcome.ABORTED  # whatever interrupts
            try:
                outcome = await self._admitted(prepared, record, scope, receive, send)
            finally:
                context.metrics.end(record, outcome, context.clock())
        finally:
            span.end(record, outcome)

    async def _turned_away(self, refusal: Rejected, record: Record, scope: Scope, send: Send) -> Outcome:
        """Refused before its text was read."""
        metrics, error = self._context.metrics, from_rejected(refusal)
        metrics.begin(record)
        outcome = Outcome.ABORTED
        record.status, record.reason = error.status, error.code or ""
        try:
            await respond_error(scope, send, error)
            outcome = _refused(error)
        except OSError:  # the client has left
            pass
        finally:
            metrics.end(record, outcome, self._context.clock())
        return outcome

    async def _admitted(self, prepared: Prepared, record: Record, scope: Scope, receive: Receive, send: Send) -> Outcome:
        outcome = Outcome.ABORTED
        async with WhileConnected(receive) as connection:
            try:
                run = Run(self._context, await self._open(prepared.batch), prepared.options, record, prepared.n)
                try:
                    if prepared.stream:
                        outcome = await _stream(run, prepared.renderer, record, scope, send, connection)
                    else:
                        outcome = await _whole(run, prepared.renderer, record, scope, send, connection)
                finally:
                    run.close()
            except ApiError as error:
                outcome = await _refuse(error, record, scope, send)
            except OSError:  # the server says so of a client that has left
                outcome = Outcome.ABORTED
        return outcome

    async def _open(self, batch: Batch) -> Session:
        """Raises ApiError."""
        try:
            return await self._context.backend.open(batch)
        except Rejected as rejected:
            raise from_rejected(rejected) from None
        except Exception as error:
            _log.exception("a request could not be opened", request_id=batch.request_id)
            raise ApiError(500, "the request failed inside the server", code="internal_error") from error


async def _refuse(error: ApiError, record: Record, scope: Scope, send: Send) -> Outcome:
    """Nothing has been sent: a whole error answer."""
    record.status, record.reason = error.status, error.code or ""
    await respond_error(scope, send, error)
    if record.completion_tokens:  # something was generated: that is no refusal
        return Outcome.FAILED
    return _refused(error)


def _refused(error: ApiError) -> Outcome:
    """What a request came to of which nothing was generated."""
    return Outcome.SHED if error.status < 500 or error.status == 503 else Outcome.FAILED


async def _whole(run: Run, renderer: Renderer, record: Record, scope: Scope, send: Send, connection: WhileConnected) -> Outcome:
    choices = [WholeChoice() for _ in range(record.choices)]
    while not run.is_over:
        for event in run.events(await run.next()):
            choices[event.delta.index].add(event.delta, event.piece)
    try:
        body = renderer.whole(choices, run.usage)
    except Exception as error:
        raise not_rendered() from error
    connection.settle()
    await respond(scope, send, 200, body)
    return Outcome.FINISHED


async def _stream(run: Run, renderer: Renderer, record: Record, scope: Scope, send: Send, connection: WhileConnected) -> Outcome:
    """Headers leave with the first Delta: until then the answer can still be an error of its own."""
    deltas = await run.next()
    first = b"".join(rendered(run, renderer, event) for event in run.events(deltas[:1]))
    await start_event_stream(scope, send)
    outbox = Outbox(send, connection.leave)
    outcome = Outcome.FINISHED
    try:
        outbox.put(first)
        try:
            delivery = Delivery(run, renderer, outbox)
            delivery.put(deltas[1:])
            await delivery.until_over()
            outbox.put(renderer.closing(run.usage) + DONE)
        except ApiError as error:
            run.close()
            record.reason = error.code or ""
            outcome = Outcome.FAILED
            outbox.put(error_event(error) + DONE)
        connection.settle()
        await outbox.finish()
    except StreamCut:  # the response stays unfinished: the server closes the connection
        record.reason = "stream_cut"
        return Outcome.ABORTED
    finally:
        outbox.abandon()
    return outcome
