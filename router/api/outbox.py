"""A stream's unsent bytes: a client that does not read must not hold up its request, nor grow our memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Message, Send

from router.api.limits import UNSENT_BYTES_MAX
from router.api.rest_of import RestOf

FLUSH_SECONDS_MAX = 30.0  # a finished answer may wait this long for its client to read on


class StreamCut(Exception):
    """The client reads too slowly: more than UNSENT_BYTES_MAX are waiting behind what it is being sent."""


class Outbox:
    """put() gathers, flush() hands it to the server in one message. Neither waits: a task sees to what the server cannot take yet."""

    __slots__ = ("_chunks", "_failed", "_is_last", "_is_over", "_on_failure", "_send", "_sender", "_unsent_bytes")

    def __init__(self, send: Send, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called once, when the server can send no more of what it could not take at once."""
        self._send = send
        self._on_failure = on_failure
        self._chunks: list[bytes] = []
        self._unsent_bytes = 0  # of the chunks
        self._sender: asyncio.Task[None] | None = None  # the server has not taken the last message yet
        self._is_last = False  # nothing is put any more
        self._is_over = False  # the end of the response was handed over
        self._failed = False

    def put(self, data: bytes) -> None:
        """Raises StreamCut. One event may be larger than the bound: only what waits for the client to read on says that it is slow."""
        if self._failed or (self._sender is not None and self._unsent_bytes > UNSENT_BYTES_MAX):
            raise StreamCut
        self._unsent_bytes += len(data)
        self._chunks.append(data)

    def flush(self) -> None:
        """What has gathered follows what is being sent. Raises ConnectionError when the server can send no more."""
        if self._sender is not None or self._failed or not (self._chunks or self._is_last):
            return
        sending = self._send(self._gathered()).__await__()
        try:
            waits_for = next(sending)
        except StopIteration:
            return
        except Exception as error:  # each server has its own
            self._failed = True
            raise ConnectionError from error
        self._sender = asyncio.create_task(self._send_on(RestOf(sending, waits_for)))

    async def finish(self) -> None:
        """Send the rest and end the response. Raises StreamCut when the client does not take it in time."""
        self._is_last = True
        self.flush()
        if self._sender is not None:
            try:
                await asyncio.wait_for(self._sender, FLUSH_SECONDS_MAX)
            except TimeoutError:
                raise StreamCut from None
        if self._failed:
            raise StreamCut

    def abandon(self) -> None:
        if self._sender is not None:
            self._sender.cancel()

    def _gathered(self) -> Message:
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._unsent_bytes = 0
        self._is_over = self._is_last
        return {"type": "http.response.body", "body": data, "more_body": not self._is_last}

    async def _send_on(self, begun: RestOf[None]) -> None:
        """What could not be taken at once, and what gathers meanwhile."""
        try:
            await begun
            while not self._is_over and (self._chunks or self._is_last):
                await self._send(self._gathered())
        except Exception:
            self._failed = True
            self._on_failure()
        self._sender = None
