"""From a request's bytes to its JSON object: read within bounds, and large ones parsed one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive

from router.api.body import BodyBudget, read_json_body
from router.api.json_input import parse_object

LARGE_BODY_BYTES = 256 * 1024


class Intake:
    """Of one router."""

    __slots__ = ("_budget", "_large")

    def __init__(self) -> None:
        self._budget = BodyBudget()
        self._large = asyncio.Lock()

    async def read_object(self, receive: Receive, headers: Mapping[str, str]) -> dict[str, Any]:
        """Raises ApiError, or ClientDisconnected. A large body takes tens of milliseconds: streams go on between two of them."""
        body = await read_json_body(receive, headers, self._budget)
        if len(body) < LARGE_BODY_BYTES:
            return parse_object(body)
        async with self._large:
            await asyncio.sleep(0)
            return parse_object(body)
