"""Notice at once when the client leaves, whatever its request is waiting for."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive


class WhileConnected:
    """Async context for a body that was read to its end: when the client leaves, what runs inside is cancelled.

    The cancellation stops at this context, and `gone` says why; one from outside goes through.
    """

    __slots__ = ("_receive", "_settled", "_task", "_watcher", "gone")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.gone = False
        self._settled = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        self._watcher.cancel()
        return self.gone and self._task.uncancel() == 0 and kind is asyncio.CancelledError

    def settle(self) -> None:
        """The answer is complete but for its sending: from now on a disconnect, which also ends every response, changes nothing."""
        self._settled = True

    def leave(self) -> None:
        """The client has gone, or is to be treated so."""
        if not self.gone and not self._settled:
            self.gone = True
            self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass  # nothing else is expected after the body
        self.leave()
