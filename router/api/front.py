"""What stands before every route: header limits, request ids, authentication, and a last answer for what nobody caught."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from itertools import chain
from random import Random

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.auth import Authenticator
from router.api.errors import ApiError
from router.api.generate import CALLER_KEY
from router.api.header_fields import header_fields
from router.api.limits import HEADER_BYTES_MAX, HEADER_FIELDS_MAX, REQUEST_ID_CHARACTERS_MAX
from router.api.respond import REQUEST_ID_KEY, respond_error

_log = structlog.get_logger()
_OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"})


class Front:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator, refused: Callable[[int], None]) -> None:
        """`refused`: counts the status of a request that came no further than this."""
        self._app = app
        self._authenticator = authenticator
        self._refused = refused
        self._random = Random(secrets.randbits(256))  # see Context.random_bits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # refused before it is accepted
            return
        try:
            try:
                self._enter(scope)
            except ApiError as error:
                self._refused(error.status)
                raise
            await self._app(scope, receive, send)
        except ApiError as error:
            await respond_error(scope, send, error)
        except Exception:
            _log.exception("a request failed", method=scope["method"], path=scope["path"][:200])
            await respond_error(scope, send, ApiError(500, "the request failed inside the server", code="internal_error"))

    def _enter(self, scope: Scope) -> None:
        """Raises ApiError 401 or 431."""
        scope[REQUEST_ID_KEY] = None
        _check_headers(scope)
        headers = header_fields(scope)
        scope[REQUEST_ID_KEY] = self._request_id(headers)
        if scope["path"] not in _OPEN_PATHS:
            scope[CALLER_KEY] = self._authenticator.caller(headers)

    def _request_id(self, headers: Mapping[str, str]) -> str:
        """The client's, if it is printable ASCII of bounded length; else one of ours."""
        given = headers.get("x-request-id", "")
        if 0 < len(given) <= REQUEST_ID_CHARACTERS_MAX and given.isascii() and given.isprintable():
            return given
        return f"{self._random.getrandbits(128):032x}"


def _check_headers(scope: Scope) -> None:
    fields = scope["headers"]
    size = sum(map(len, chain.from_iterable(fields)))
    if len(fields) > HEADER_FIELDS_MAX or size > HEADER_BYTES_MAX:
        limit = f"{HEADER_FIELDS_MAX} fields and {HEADER_BYTES_MAX} bytes"
        raise ApiError(431, f"the headers exceed {limit}", headers={"connection": "close"})


async def http_error(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405 in OpenAI's shape."""
    assert isinstance(error, HTTPException), "registered for HTTPException only"
    messages = {404: "there is no such route", 405: "this route does not take that method"}
    answer = ApiError(error.status_code, messages.get(error.status_code, error.detail), headers=dict(error.headers or {}))
    headers = {name.decode(): value.decode() for name, value in answer.all_headers()}
    request_id = request.scope.get(REQUEST_ID_KEY)
    if request_id:
        headers["x-request-id"] = request_id
    return Response(answer.body(), error.status_code, headers)
