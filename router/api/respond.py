"""Raw ASGI answers: one place that writes status and headers."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

import orjson
from starlette.types import Message, Scope, Send

from router.api.errors import ApiError

Headers = Sequence[tuple[bytes, bytes]]
REQUEST_ID_KEY = "rantang.request_id"  # in the scope: what X-Request-Id says
_JSON: Headers = ((b"content-type", b"application/json"),)
_EVENT_STREAM: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


async def respond(scope: Scope, send: Send, status: int, body: bytes, headers: Headers = _JSON) -> None:
    await send(_start(scope, status, [*headers, (b"content-length", b"%d" % len(body))]))
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body, "more_body": False})


async def respond_json(scope: Scope, send: Send, value: object, status: int = 200) -> None:
    await respond(scope, send, status, orjson.dumps(value))


def respond_error(scope: Scope, send: Send, error: ApiError) -> Coroutine[Any, Any, None]:
    return respond(scope, send, error.status, error.body(), error.all_headers())


async def start_event_stream(scope: Scope, send: Send) -> None:
    await send(_start(scope, 200, list(_EVENT_STREAM)))


def _start(scope: Scope, status: int, headers: list[tuple[bytes, bytes]]) -> Message:
    request_id = scope.get(REQUEST_ID_KEY)
    if isinstance(request_id, str):
        headers.append((b"x-request-id", request_id.encode()))
    return {"type": "http.response.start", "status": status, "headers": headers}
