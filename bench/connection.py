"""One HTTP/1.1 connection that carries one request at a time: httptools over an asyncio protocol.

A general client spends 50–100 µs on every chunk of a stream; thousands of streams on one core leave room for a tenth.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server listens. `prefix` stands before every path (an URL may end in /v1 or not)."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    api_key: str = ""

    @staticmethod
    def parse(url: str, api_key: str = "") -> Target:
        """Raises ValueError for anything but http(s)://host[:port][/path], what would be dropped among it."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http(s) URL: {url!r}")
        if "@" in parts.netloc:
            raise ValueError("a URL with a user or a password: they would not be sent; a key is given as --api-key")
        if parts.query or parts.fragment:
            raise ValueError("a URL ends with its path, and what follows would not be sent")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return Target(parts.hostname, parts.port or (443 if tls else 80), tls, prefix, api_key)


class Sink(Protocol):
    """Who hears about one answer. After `ended` or `broken` nothing more is said."""

    def begun(self, status: int, headers: dict[str, str], now_s: float) -> None: ...

    def received(self, data: bytes, now_s: float) -> None: ...

    def ended(self, now_s: float) -> None: ...

    def broken(self, reason: str, now_s: float) -> None: ...


class Connection(asyncio.Protocol):
    """`now_s` given to the sink is the time at which the bytes came off the socket."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._sink: Sink | None = None
        self._headers: dict[str, str] = {}
        self._now_s = 0.0
        self._keep_alive = False
        self._until_closed = False  # the end of the connection is that of the answer
        self.uses = 0
        self.answered = False  # a byte came since the last start

    @property
    def reusable(self) -> bool:
        """Open, idle, and the server did not ask to close it."""
        return self._transport is not None and not self._transport.is_closing() and self._sink is None and self._keep_alive

    def start(self, request: bytes, sink: Sink) -> None:
        """Send one request. The connection is new, or `reusable`."""
        assert self._sink is None, "one request at a time"
        self._sink = sink
        self._parser = httptools.HttpResponseParser(self)
        self.uses += 1
        self.answered = self._until_closed = False
        if self._transport is None or self._transport.is_closing():
            self._now_s = time.perf_counter()
            self._break("connection closed")
            return
        self._transport.write(request)

    def mark_idle(self) -> None:
        """A connection opened ahead of its first request may wait in a pool."""
        self._keep_alive = True

    def abort(self) -> None:
        """Hang up at once; the sink hears nothing more."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        self.answered = True
        if self._sink is None or self._parser is None:
            self._keep_alive = False  # bytes nobody asked for: never use this connection again
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(f"bad HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._now_s = time.perf_counter()
        self._keep_alive = False
        if self._sink is not None and self._until_closed and exc is None:
            sink, self._sink = self._sink, None
            sink.ended(self._now_s)
        elif self._sink is not None:
            self._break("connection closed" if exc is None else f"connection lost: {exc}")

    # --- httptools ---

    def on_message_begin(self) -> None:
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        measured = "content-length" in self._headers or "chunked" in self._headers.get("transfer-encoding", "").lower()
        self._until_closed = status >= 200 and status not in (204, 304) and not measured
        if self._sink is not None and status >= 200:
            self._sink.begun(status, self._headers, self._now_s)

    def on_body(self, body: bytes) -> None:
        if self._sink is not None:
            self._sink.received(body, self._now_s)

    def on_message_complete(self) -> None:
        parser, sink = self._parser, self._sink
        assert parser is not None
        if sink is None or parser.get_status_code() < 200:
            return
        self._keep_alive = parser.should_keep_alive()
        self._sink = None
        sink.ended(self._now_s)
        if not self._keep_alive and self._transport is not None:
            self._transport.close()

    def _break(self, reason: str) -> None:
        sink, self._sink, self._keep_alive = self._sink, None, False
        if self._transport is not None:
            self._transport.abort()
        if sink is not None:
            sink.broken(reason, self._now_s or time.perf_counter())


class ConnectionPool:
    """Idle connections to one target, most recently used first. Bounded by what was once in use together."""

    def __init__(self, target: Target, *, connect_timeout_s: float = 30.0, idle_max: int = 4096) -> None:
        self.target = target
        self._connect_timeout_s = connect_timeout_s
        self._idle_max = idle_max
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if target.tls else None

    async def take(self, *, fresh: bool = False) -> Connection:
        """An idle connection, or a new one (always, when `fresh`). Raises OSError or TimeoutError."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_timeout_s):
            _, connection = await loop.create_connection(Connection, self.target.host, self.target.port, ssl=self._tls)
        return connection

    def give_back(self, connection: Connection) -> None:
        if connection.reusable and len(self._idle) < self._idle_max:
            self._idle.append(connection)
        else:
            connection.abort()

    async def open_ahead(self, count: int) -> None:
        """Have `count` idle connections, so that a burst does not measure handshakes."""
        for _ in range(count - len(self._idle)):
            connection = await self.take(fresh=True)
            connection.mark_idle()
            self._idle.append(connection)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()
