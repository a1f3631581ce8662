"""The one thread that computes in a replica: the runner is made on it, warmed up on it, and runs its steps on it.

libgomp keeps a team of workers for every thread that has ever entered a parallel region. With two teams there are more
workers than cores, and it stops spinning between regions, of which a step has hundreds: the same step of 8 decodes took
34 ms where the model had been loaded on the engine's thread and 56 ms where it had been loaded on another that still lived.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class EngineThread:
    """Runs what it is given, in order. A daemon: a call that hangs does not keep the process alive."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """`call` after those before it; its result or exception is the future's."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(run)
        return future

    def end(self) -> None:
        """The thread ends after the calls it has. Idempotent."""
        self._calls.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _main(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
