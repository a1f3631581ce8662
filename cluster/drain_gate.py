"""An ASGI wrapper around a router's app that can be told to let nothing new in, and knows when the last request has left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/health", "/metrics")  # what operators ask goes on until the end
RETRY_AFTER_S = 1
_BODY = b'{"error":{"message":"the server is shutting down","type":"server_error","param":null,"code":"draining"}}'


class DrainGate:
    """Counts requests in flight. After `close`, new ones get 503 with Retry-After; running ones finish."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._closed = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def close(self) -> None:
        self._closed = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """True once no request is in flight, False if that takes longer."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("path") in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        if self._closed:
            await _refuse(send)
            return
        self._in_flight += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()


async def _refuse(send: Send) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(_BODY)).encode()),
        (b"retry-after", str(RETRY_AFTER_S).encode()),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": _BODY})
