"""The caller's end of one batch: a bounded queue of Deltas between the switchboard's effects and the API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from router.ports import Delta, Rejected

DELTAS_MAX = 65_536  # unread; a caller that reads nothing for so long has gone


class BatchSession:
    """Implements router.ports.Session. `open_` must be awaited before iterating."""

    def __init__(self, *, stop: Callable[[int], None], close: Callable[[], None]) -> None:
        self._stop = stop
        self._close = close
        self._deltas: list[Delta] = []
        self._stopped: dict[int, None] = {}
        self._rejected: Rejected | None = None
        self._opened = False
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None  # who has one does not wait

    # --- Session -----------------------------------------------------------------------------------------------------

    def __aiter__(self) -> BatchSession:
        return self

    async def __anext__(self) -> list[Delta]:
        """Raises Rejected when the batch failed before anything of it was yielded."""
        while not (deltas := self.take()):
            await self._wait()
        return deltas

    def take(self) -> list[Delta]:
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            return deltas
        if self._rejected is not None:
            raise self._rejected
        if self._ended:
            raise StopAsyncIteration
        return []

    def listen(self, call: Callable[[], None]) -> None:
        self._listener = call
        if self._deltas or self._ended or self._rejected is not None:
            self._wake()

    def stop(self, index: int) -> None:
        if index in self._stopped or self._ended:
            return
        self._stopped[index] = None
        self._deltas = [delta for delta in self._deltas if delta.index != index]
        self._stop(index)

    def close(self) -> None:
        self._deltas.clear()
        if not self._ended:
            self._close()
            self.ended()
        self._listener = None

    # --- the dispatcher's side ---------------------------------------------------------------------------------------

    async def open_(self) -> None:
        """Returns once the batch is in the engines; raises Rejected."""
        while not self._opened:
            if self._rejected is not None:
                raise self._rejected
            if self._ended:
                return
            await self._wait()

    def opened(self) -> None:
        self._opened = True
        self._wake()

    def put(self, delta: Delta) -> bool:
        """False: the caller has left too much unread."""
        if delta.index in self._stopped or self._ended:
            return True
        if len(self._deltas) >= DELTAS_MAX:
            return False
        self._deltas.append(delta)
        if len(self._deltas) == 1:
            self._wake()
        return True

    def reject(self, rejected: Rejected) -> None:
        self._rejected = rejected
        self._wake()

    def ended(self) -> None:
        self._ended = True
        self._wake()

    def _wait(self) -> asyncio.Future[None]:
        """One reader at a time."""
        assert self._waiter is None or self._waiter.done()
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _wake(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().call_soon(self._listener)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Sessions:
    """Those that are open, by the number of their batch."""

    def __init__(self) -> None:
        self._open: dict[int, BatchSession] = {}
        self._idle = asyncio.Event()  # set when the last one leaves

    def add(self, number: int, session: BatchSession) -> None:
        self._open[number] = session

    def get(self, number: int) -> BatchSession | None:
        return self._open.get(number)

    def drop(self, number: int) -> None:
        """Idempotent."""
        self._open.pop(number, None)
        if not self._open:
            self._idle.set()

    def all(self) -> tuple[BatchSession, ...]:
        return tuple(self._open.values())

    async def wait_empty(self, timeout_s: float) -> None:
        """At most so long."""
        if self._open:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)

    def __len__(self) -> int:
        return len(self._open)
