"""Streaming load client for any OpenAI-compatible server: thousands of streams from one core.

`LoadClient.send` is one request; `closed_loop` and `open_loop` make load of it. Both record when a request was *due*.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from bench.answer import AnswerReader, Expectation
from bench.connection import Connection, ConnectionPool, Target
from bench.record import Outcome, RequestRecord

RETRIES_MAX = 16  # after refusals, of one request
CLOSED_BEFORE_S = 0.1  # an idle connection that the server had closed ends so soon after it is written to: a round trip
END_S = 5.0  # from [DONE] to the end of the answer
TIMER_SLACK_S = 0.01  # a timer may fire early by the loop's granularity


@dataclass(frozen=True, slots=True)
class Call:
    """One request to be sent: everything but when."""

    path: str
    body: bytes
    expect: Expectation = field(default_factory=Expectation)
    cancel_after_s: float | None = None  # hang up this long after the request was due
    headers: tuple[tuple[str, str], ...] = ()
    group: str = ""
    new_connection: bool = False


class LoadClient:
    """Sends calls to one server. `tokens_received` grows while streams run, for who measures a window of time.

    `obey_retry_after`: a refusal that says when to come again is obeyed, a few times and within the time limit; the
    request still counts from when it was first due.
    """

    def __init__(self, target: Target, *, timeout_s: float = 600.0, reuse_connections: bool = True, obey_retry_after: bool = False) -> None:
        self.target = target
        self._obey = obey_retry_after
        self._pool = ConnectionPool(target)
        self._timeout_s = timeout_s
        self._reuse = reuse_connections
        self._live: dict[int, RequestRecord] = {}
        self._finished_tokens = 0
        self._serial = 0

    @property
    def tokens_received(self) -> int:
        """Tokens seen so far, of finished and of running streams."""
        return self._finished_tokens + sum(record.tokens_seen for record in self._live.values())

    async def open_ahead(self, connections: int) -> None:
        await self._pool.open_ahead(connections)

    def close(self) -> None:
        self._pool.close()

    async def send(self, call: Call, scheduled_s: float | None = None) -> RequestRecord:
        """The record of one request. Never raises for what a server does, never outlives the time limit."""
        record = RequestRecord(time.perf_counter() if scheduled_s is None else scheduled_s, group=call.group)
        self._serial += 1
        serial = self._serial
        self._live[serial] = record
        try:
            await self._send(call, record)
            while (wait_s := self._wait_s(call, record)) is not None:
                await asyncio.sleep(wait_s)
                record.begin_again()
                await self._send(call, record)
        finally:
            del self._live[serial]
            self._finished_tokens += record.tokens_seen
        return record

    async def _send(self, call: Call, record: RequestRecord) -> None:
        request = self._request_bytes(call)
        fresh = call.new_connection or not self._reuse
        for _ in range(2):
            over = asyncio.Event()
            limit = asyncio.timeout(self._patience_s(call, record))
            reader = AnswerReader(record, call.expect, over.set, partial(_end_soon, limit))
            connection: Connection | None = None
            try:
                async with limit:
                    connection = await self._pool.take(fresh=fresh)
                    started_s = time.perf_counter()
                    if record.sent_s is None:
                        record.sent_s = started_s
                    connection.start(request, reader)
                    await over.wait()
            except TimeoutError:
                if connection is not None:
                    connection.abort()
                now_s = time.perf_counter()
                left = call.cancel_after_s is not None and now_s - record.scheduled_s >= call.cancel_after_s - TIMER_SLACK_S
                if left or not reader.overdue(now_s):
                    reader.finish(Outcome.CANCELLED if left else Outcome.TIMEOUT, now_s)
                return
            except OSError as error:
                reader.broken(f"cannot connect: {_why(error)}", time.perf_counter())
                return
            self._pool.give_back(connection)
            if connection.answered or connection.uses == 1 or (record.end_s or 0.0) - started_s > CLOSED_BEFORE_S:
                return
            # The server had closed an idle connection before it saw this request: that is no answer. Once, on a new one; counted.
            fresh = True
            record.resends += 1
            record.problems.clear()

    def _patience_s(self, call: Call, record: RequestRecord) -> float:
        """Until the client gives up: by its time limit, or on schedule, which counts from when the request was due."""
        now_s = time.perf_counter()
        limit_s = self._timeout_s - (now_s - record.scheduled_s if record.retries else 0.0)
        if call.cancel_after_s is not None:
            limit_s = min(limit_s, record.scheduled_s + call.cancel_after_s - now_s)
        return max(0.0, limit_s)

    def _wait_s(self, call: Call, record: RequestRecord) -> float | None:
        """Until this request may be sent again; None when it is over, or no time is left for it."""
        if not self._obey or record.status not in (429, 503) or record.retries >= RETRIES_MAX:
            return None
        wait_s = record.refusal.wait_s
        return wait_s if wait_s is not None and 0 <= wait_s < self._patience_s(call, record) else None

    def _request_bytes(self, call: Call) -> bytes:
        target = self.target
        lines = [
            f"POST {target.prefix}{call.path} HTTP/1.1",
            f"Host: {target.host}:{target.port}",
            "Content-Type: application/json",
            f"Content-Length: {len(call.body)}",
            "Connection: keep-alive" if self._reuse else "Connection: close",
        ]
        if target.api_key:
            lines.append(f"Authorization: Bearer {target.api_key}")
        lines.extend(f"{name}: {value}" for name, value in call.headers)
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + call.body


def _end_soon(limit: asyncio.Timeout) -> None:
    """Once an answer says that it is over, its end is waited for no longer than this."""
    due_s, when_s = asyncio.get_running_loop().time() + END_S, limit.when()
    if not limit.expired() and (when_s is None or due_s < when_s):
        limit.reschedule(due_s)


def _why(error: OSError) -> str:
    """`connection refused`, without the address, which every request of a run has in common."""
    words = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror
    return (words or str(error) or type(error).__name__).lower()


async def closed_loop(client: LoadClient, calls: Sequence[Call], *, streams: int) -> list[RequestRecord]:
    """`streams` clients, each sending its next call when its last one ended, until the calls are used up."""
    remaining = iter(calls)
    records: list[RequestRecord] = []

    async def one_stream() -> None:
        for call in remaining:  # shared: whoever is free takes the next
            records.append(await client.send(call))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(streams, len(calls))):  # one without a call has nothing to do
            group.create_task(one_stream())
    return records


async def open_loop(
    client: LoadClient, calls: Sequence[Call], arrivals_s: Sequence[float], *, in_flight_max: int = 10_000
) -> list[RequestRecord]:
    """Call i is due at arrivals_s[i] (seconds from now, ascending), whatever the server does.

    Beyond `in_flight_max` a due request waits in the client, and its latency says so.
    """
    assert len(calls) == len(arrivals_s)
    start_s = time.perf_counter()
    slots = asyncio.Semaphore(in_flight_max)

    async def one(call: Call, due_s: float) -> RequestRecord:
        async with slots:
            return await client.send(call, due_s)

    tasks: list[asyncio.Task[RequestRecord]] = []
    async with asyncio.TaskGroup() as group:
        for call, arrival_s in zip(calls, arrivals_s, strict=True):
            wait_s = start_s + arrival_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(one(call, start_s + arrival_s)))
    return [task.result() for task in tasks]


def json_call(
    path: str,
    body: object,
    expect: Expectation | None = None,
    *,
    cancel_after_s: float | None = None,
    group: str = "",
    new_connection: bool = False,
) -> Call:
    """A call with a body given as plain data."""
    encoded = msgspec.json.encode(body)
    return Call(path, encoded, expect or Expectation(), cancel_after_s, group=group, new_connection=new_connection)
