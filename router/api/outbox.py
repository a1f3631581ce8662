"""A stream's unsent bytes: a client that does not read must not hold up its request, nor grow our memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Send

from router.api.limits import UNSENT_BYTES_MAX

FLUSH_SECONDS_MAX = 30.0  # a finished answer may wait this long for its client to read on


class StreamCut(Exception):
    """The client reads too slowly: more than UNSENT_BYTES_MAX are waiting behind what it is being sent."""


class Outbox:
    """put() never waits; a task sends what has gathered, in one message."""

    __slots__ = ("_chunks", "_closing", "_failed", "_on_failure", "_send", "_sending", "_unsent_bytes", "_wake", "_writer")

    def __init__(self, send: Send, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called once, when the server can send no more."""
        self._send = send
        self._on_failure = on_failure
        self._chunks: list[bytes] = []
        self._unsent_bytes = 0  # of the chunks
        self._sending = False  # the server has not taken the last message yet
        self._closing = False
        self._failed = False
        self._wake = asyncio.Event()
        self._writer = asyncio.create_task(self._write())

    def put(self, data: bytes) -> None:
        """Raises StreamCut. One event may be larger than the bound: only what waits for the client to read on says that it is slow."""
        if self._failed or (self._sending and self._unsent_bytes > UNSENT_BYTES_MAX):
            raise StreamCut
        self._unsent_bytes += len(data)
        self._chunks.append(data)
        self._wake.set()

    async def finish(self) -> None:
        """Send the rest and end the response. Raises StreamCut when the client does not take it in time."""
        self._closing = True
        self._wake.set()
        try:
            await asyncio.wait_for(self._writer, FLUSH_SECONDS_MAX)
        except TimeoutError:
            raise StreamCut from None
        if self._failed:
            raise StreamCut

    def abandon(self) -> None:
        self._writer.cancel()

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._chunks:
                    data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
                    self._chunks.clear()
                    self._unsent_bytes = 0
                    self._sending = True
                    await self._send({"type": "http.response.body", "body": data, "more_body": True})
                    self._sending = False
                elif self._closing:
                    await self._send({"type": "http.response.body", "body": b"", "more_body": False})
                    return
                if self._closing:
                    self._wake.set()
        except Exception:  # the server says that the connection is gone, each in its own way
            self._failed = True
            self._on_failure()
