"""The one timer of a router: calls back after a period that may become shorter at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Ticker:
    """`period_s` is asked at every `arm`; an earlier time replaces a later one. Nothing runs before the first `arm`."""

    def __init__(self, tick: Callable[[], None], period_s: Callable[[], float], clock: Callable[[], float]) -> None:
        self._tick = tick
        self._period_s = period_s
        self._clock = clock
        self._handle: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._is_over = False

    def arm(self) -> None:
        period_s = self._period_s()
        due_s = self._clock() + period_s
        if self._is_over or (self._handle is not None and self._due_s <= due_s + 0.001):
            return
        if self._handle is not None:
            self._handle.cancel()
        self._due_s = due_s
        self._handle = asyncio.get_running_loop().call_later(period_s, self._fire)

    def stop(self) -> None:
        """For good."""
        self._is_over = True
        if self._handle is not None:
            self._handle.cancel()

    def _fire(self) -> None:
        self._handle = None
        self._tick()
        self.arm()
