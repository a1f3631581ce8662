"""Raw ASGI answers: one place that writes status and headers."""

from __future__ import annotations

from collections.abc import Sequence

import orjson
from starlette.types import Scope, Send

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
    await _start(scope, send, status, (*headers, (b"content-length", str(len(body)).encode())))
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body, "more_body": False})


async def respond_json(scope: Scope, send: Send, value: object, status: int = 200) -> None:
    await respond(scope, send, status, orjson.dumps(value))


async def respond_error(scope: Scope, send: Send, error: ApiError) -> None:
    await respond(scope, send, error.status, error.body(), error.all_headers())


async def start_event_stream(scope: Scope, send: Send) -> None:
    await _start(scope, send, 200, _EVENT_STREAM)


async def _start(scope: Scope, send: Send, status: int, headers: Headers) -> None:
    request_id = scope.get(REQUEST_ID_KEY)
    extra: Headers = ((b"x-request-id", request_id.encode()),) if isinstance(request_id, str) else ()
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *extra]})
