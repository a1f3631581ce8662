"""Bytes to JSON values, strictly: UTF-8, no NaN or Infinity, no lone surrogates, bounded depth."""

from __future__ import annotations

from typing import Any

import orjson

from router.api.errors import bad_request
from router.api.limits import JSON_DEPTH_MAX


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """The root object. Of a repeated name the last counts. Raises ApiError 400 naming the position, or the field too deep."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(None, f"the body is not valid JSON: {error.msg} at position {error.pos}", "invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request(None, "the body must be a JSON object", "invalid_json")
    if body.count(b"[") + body.count(b"{") > JSON_DEPTH_MAX:  # else it cannot be too deep
        for name, item in value.items():
            if _deeper_than(item, JSON_DEPTH_MAX - 1):
                param = name if name.isidentifier() and len(name) <= 64 else None
                raise bad_request(param, f"the JSON is nested deeper than {JSON_DEPTH_MAX} levels", "json_too_deep")
    return value


def _deeper_than(value: Any, depth_max: int) -> bool:
    """Level by level, without recursion: each container is visited once."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth_max):
        if not level:
            return False
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        ]
    return bool(level)
