"""A request's headers as a plain dict, made once: they are asked for a dozen times, and each look through ASGI's list costs as much."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Scope

_KEY = "rantang.headers"  # in the scope


def header_fields(scope: Scope) -> Mapping[str, str]:
    """By lower-case name, as ASGI gives them; of a repeated one the first."""
    fields: Mapping[str, str] | None = scope.get(_KEY)
    if fields is None:
        fields = scope[_KEY] = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
    return fields
