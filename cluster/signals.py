"""SIGINT and SIGTERM of `rantang serve`: while it starts they end it, from a thread of their own; later they ask to drain.

An exception that a handler raises would come up inside Ray, in the middle of calls into C that do not expect one; and a handler runs only
when such a call returns, which may take many seconds. So Python's C handler writes a byte to a socket, and a thread reads it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from cluster.early_exit import NUMBERS

_NOTICE_S = 5.0  # until the thread has been told of a signal whose handler, Ray's own say, has run


class Signals:
    def __init__(self, abort: Callable[[], None]) -> None:
        """`abort` ends the process, from a thread, whatever the main thread is in."""
        self._abort = abort
        self._lock = threading.Lock()
        self._starting = True
        self._aborting = threading.Event()
        self._count = 0
        self._wake = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def install(self) -> None:
        """From the main thread; again after `ray.init`, which sets a handler of its own."""
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)  # first: a signal between the two would not be heard of
        for number in NUMBERS:
            signal.signal(number, self._on_signal)

    def watch(self) -> None:
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """What is taken within is known to who aborts. Does not return once one has begun to: nobody would give back what came later."""
        with self._lock:
            if not self._aborting.is_set():
                yield
                return
        threading.Event().wait()

    def go_on(self) -> None:
        """Before the next stage of the start; does not return once it is being aborted."""
        with self.taking():
            pass

    def started(self) -> None:
        """From here on a signal ends nothing by itself. Does not return once one has begun to."""
        with self._lock:
            self._starting = self._aborting.is_set()
        if self._starting:
            threading.Event().wait()

    def give_way(self) -> None:
        """Somebody's handler has raised in this thread: the signal that it was for ends the process. Returns if there was none."""
        if self._aborting.wait(_NOTICE_S):
            threading.Event().wait()

    @property
    def asked_to_hurry(self) -> bool:
        return self._count > 1

    def wait(self, timeout_s: float) -> bool:
        return self._wake.wait(timeout_s)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1
        self._wake.set()

    def _watch(self) -> None:
        while numbers := self._reader.recv(64):
            if set(NUMBERS).isdisjoint(numbers):
                continue
            with self._lock:
                if not self._starting:
                    return
                self._aborting.set()
            self._abort()


def mute() -> None:
    """Whatever else this process has to say, Ray's threads about processes that are being ended say, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
