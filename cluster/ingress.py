"""A router's requests go straight from its HTTP server to its app.

Serve wraps a request into a task, a queue, a log record and several metrics of its own, about as much work as the router's
whole refusal. This middleware stands before all that, in every server of Serve's; where no router has attached its app, and
for all other paths, it lets the request pass. cluster.environment names it to Serve. A router that stops is not cut short:
Serve ends its HTTP server before it ends the router, and that waits for the requests in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.middleware import Middleware

from cluster.drain_gate import App, Message, Receive, Scope, Send

PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})  # as they are without a route prefix; with one, Serve does its work

_REQUEST_ID = b"x-request-id"


@dataclass(slots=True)
class Attached:
    """The app of the router that lives in this process, and the loop it lives on. One a process."""

    app: App | None = None
    loop: asyncio.AbstractEventLoop | None = None


_attached = Attached()


def attach(app: App) -> None:
    """Called on the loop that `app` belongs to."""
    _attached.app, _attached.loop = app, asyncio.get_running_loop()


def middlewares() -> list[Middleware]:
    """What Serve asks for when it starts an HTTP server."""
    return [Middleware(Shortcut)]


class _RequestIdOnce:
    """Serve puts its X-Request-Id beside the router's, which says the same: a client that joins equal fields would read "id, id"."""

    __slots__ = ("_send",)

    def __init__(self, send: Send) -> None:
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": _once(message["headers"])}
        await self._send(message)


def _once(fields: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Without any X-Request-Id but the first."""
    kept: list[tuple[bytes, bytes]] = []
    for name, value in fields:
        if name.lower() != _REQUEST_ID or all(other.lower() != _REQUEST_ID for other, _ in kept):
            kept.append((name, value))
    return kept


class Shortcut:
    """ASGI middleware."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"] not in PATHS:
            send = _RequestIdOnce(send)
        here = _attached.loop is asyncio.get_running_loop()  # else there is none, or Serve runs user code on another thread
        if here and _attached.app is not None and scope["type"] == "http" and scope["path"] in PATHS:
            app = _attached.app
        await app(scope, receive, send)
