"""From a request's bytes to its JSON object: read within bounds, and large ones parsed one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive

from router.api.body import BodyBudget, read_json_body
from router.api.json_input import parse_object
from router.api.limits import IDS_INLINE_BYTES_MAX, TEXT_INLINE_BYTES_MAX

LARGE_BODY_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Taken:
    """A body's JSON object."""

    fields: dict[str, Any]
    size_bytes: int

    @property
    def is_short(self) -> bool:
        """Nothing in it is long enough to hold up the loop."""
        most = IDS_INLINE_BYTES_MAX if _is_ids(self.fields) else TEXT_INLINE_BYTES_MAX
        return self.size_bytes <= most and "bad_words" not in self.fields  # each of those is a text of its own


def _is_ids(fields: Mapping[str, Any]) -> bool:
    """The prompt is written in token ids: there is no text to tokenize."""
    prompt = fields.get("prompt")
    return "messages" not in fields and isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], str)


class Intake:
    """Of one router."""

    __slots__ = ("_budget", "_large")

    def __init__(self) -> None:
        self._budget = BodyBudget()
        self._large = asyncio.Lock()

    def read(self, receive: Receive, headers: Mapping[str, str]) -> Coroutine[Any, Any, bytes]:
        """The whole body, not looked into. Raises ApiError, or ClientDisconnected."""
        return read_json_body(receive, headers, self._budget)

    async def parse(self, body: bytes) -> Taken:
        """Raises ApiError. A large body takes tens of milliseconds: streams go on between two of them."""
        if len(body) < LARGE_BODY_BYTES:
            return Taken(parse_object(body), len(body))
        async with self._large:
            await asyncio.sleep(0)
            return Taken(parse_object(body), len(body))
