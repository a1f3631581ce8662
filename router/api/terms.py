"""What a request asks of admission: its class and its own promises, from headers and `service_tier`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from router.api.errors import ApiError, bad_request
from router.api.limits import CLASS_CHARACTERS_MAX, QUEUE_TIME_SLO_MS_MAX, TPOT_SLO_MS_MAX, TTFT_SLO_MS_MAX
from router.api.submission import Caller
from router.policy.classes import Classes, Terms

CLASS_HEADER = "x-request-class"
_PROMISES: Mapping[str, float] = {  # most milliseconds
    "X-Queue-Time-SLO-Ms": QUEUE_TIME_SLO_MS_MAX,
    "X-TTFT-SLO-Ms": TTFT_SLO_MS_MAX,
    "X-TPOT-SLO-Ms": TPOT_SLO_MS_MAX,
}
_PROMISE_HEADERS = frozenset(name.lower() for name in _PROMISES)


def read_terms(headers: Mapping[str, str], fields: Mapping[str, Any], caller: Caller, classes: Classes) -> Terms:
    """Raises ApiError 400, naming the header or field and its limit. The header goes before the field."""
    request_class = _class(headers, fields, classes)
    if _PROMISE_HEADERS.isdisjoint(headers):
        return _terms(request_class, caller.tenant)
    promises = (_seconds(headers, name, most) for name, most in _PROMISES.items())
    return Terms(request_class, caller.tenant, *promises)


@lru_cache(maxsize=256)
def _terms(request_class: str, tenant: str) -> Terms:
    """Without promises of its own; most requests are so."""
    return Terms(request_class, tenant)


def class_is_in_body(headers: Mapping[str, str], body: bytes, classes: Classes) -> bool:
    """Several classes, no header, and a body that seems to name one: nothing can be foreseen before it is read."""
    return len(classes.names) > 1 and CLASS_HEADER not in headers and b'"service_tier"' in body


def _class(headers: Mapping[str, str], fields: Mapping[str, Any], classes: Classes) -> str:
    name, param = headers.get(CLASS_HEADER), None
    if name is None:
        name, param = fields.get("service_tier"), "service_tier"
    if name is not None and not (isinstance(name, str) and len(name) <= CLASS_CHARACTERS_MAX):
        raise bad_request(param, f"a class of service is a string of at most {CLASS_CHARACTERS_MAX} characters", "unknown_class")
    found = classes.asked(name.strip() if name else None)
    if found is None:
        what = "service_tier" if param else "X-Request-Class"
        raise ApiError(400, f"{what} names no class of service; there are {', '.join(classes.names)}", param, "unknown_class")
    return found


def _seconds(headers: Mapping[str, str], header: str, milliseconds_max: float) -> float | None:
    value = headers.get(header.lower())
    if value is None:
        return None
    try:
        milliseconds = float(value) if len(value) <= 32 else math.nan
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds <= milliseconds_max:
        raise bad_request(None, f"{header} must be a number of milliseconds above 0, at most {milliseconds_max:g}")
    return milliseconds / 1000
