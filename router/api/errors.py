"""Every way to say no, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}. Submitted strings are never echoed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import pydantic

from router.api.limits import ERROR_BODY_BYTES_MAX, ERRORS_SHOWN_MAX
from router.ports import Rejected

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
}
_MESSAGE_CHARACTERS_MAX = 2_000


@dataclass(slots=True, eq=False)
class ApiError(Exception):
    """Ends a request with this answer. `param` names the field at fault; `code` is for programs."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        """Strict JSON of at most ERROR_BODY_BYTES_MAX."""
        error: dict[str, Any] = {
            "message": self.message[:_MESSAGE_CHARACTERS_MAX],
            "type": _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error"),
            "param": None if self.param is None else self.param[:200],
            "code": self.code,
        }
        if self.retry_after_s is not None:
            error["retry_after_ms"] = _milliseconds(self.retry_after_s)
        body = orjson.dumps({"error": error})
        assert len(body) <= ERROR_BODY_BYTES_MAX, "an error body above its limit"
        return body

    def all_headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            milliseconds = _milliseconds(self.retry_after_s)
            headers.append((b"retry-after", b"%d" % math.ceil(milliseconds / 1000)))
            headers.append((b"retry-after-ms", b"%d" % milliseconds))
        headers += [(name.encode(), value.encode()) for name, value in self.headers.items()]
        return headers


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def from_rejected(rejected: Rejected) -> ApiError:
    """429 and 503 always carry Retry-After: without a prediction, a second."""
    wait_s = rejected.retry_after_s
    if rejected.status in (429, 503) and (wait_s is None or not math.isfinite(wait_s)):
        wait_s = 1.0
    return ApiError(rejected.status, rejected.message, None, rejected.reason, None if wait_s is None else max(wait_s, 0.001))


def from_validation(error: pydantic.ValidationError) -> ApiError:
    """The first errors by field, in pydantic's words or ours; none of them repeats what was sent."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [f"{_field(item['loc']) or 'body'}: {item['msg'].removeprefix('Value error, ')}" for item in found[:ERRORS_SHOWN_MAX]]
    if len(found) > ERRORS_SHOWN_MAX:
        lines.append(f"and {len(found) - ERRORS_SHOWN_MAX} more")
    return bad_request(_field(found[0]["loc"]) or None, "; ".join(lines))


def _field(location: tuple[int | str, ...]) -> str:
    """messages.3.content → "messages[3].content". Only names of our own fields and numbers can stand in a location."""
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name


def _milliseconds(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1000))
