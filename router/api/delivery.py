"""A stream that has begun: what comes in one turn of the loop goes to text, to bytes and to the server in one call.

Its request's task waits for the end alone: to wake it for each token, through all that a request runs within, costs more than the token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from router.api.answer import Renderer
from router.api.outbox import Outbox
from router.api.rendering import rendered
from router.api.run import Run
from router.ports import Delta


class Delivery:
    __slots__ = ("_error", "_outbox", "_over", "_plain", "_renderer", "_run")

    def __init__(self, run: Run, renderer: Renderer, outbox: Outbox) -> None:
        self._run = run
        self._renderer = renderer
        self._outbox = outbox
        self._plain = [renderer.plain(index) for index in range(run.choices)]
        self._over = asyncio.get_running_loop().create_future()
        self._error: Exception | None = None

    async def until_over(self) -> None:
        """All that follows is put and flushed, but for what comes with the end, which is put only. Raises as `put`, and OSError."""
        if self._run.is_over:
            return
        self._outbox.flush()
        self._run.listen(self._heard)
        await self._over
        if self._error is not None:
            raise self._error

    def put(self, deltas: Sequence[Delta]) -> None:
        """Tokens that came together are sent together, each as an event of its own. Raises StreamCut; ApiError after what came before."""
        run, outbox = self._run, self._outbox
        now_s = run.now()
        start = 0
        while start < len(deltas):
            plain = self._plain[deltas[start].index]
            if plain is not None and (events := run.plain(plain, deltas, start, now_s)):
                outbox.put(b"".join(events))
                start += len(events)
                continue
            event = run.event(deltas[start], now_s)
            if event is not None and (data := rendered(run, self._renderer, event)):
                outbox.put(data)
            start += 1

    def _heard(self) -> None:
        if self._over.done():  # or its task was cancelled
            return
        try:
            self.put(self._run.take())
            if not self._run.is_over:
                self._outbox.flush()
                return
        except Exception as error:
            self._error = error
        self._over.set_result(None)
