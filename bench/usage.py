"""How a command ends that the user got wrong, or ended: one line and status 2, or through every `finally`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

import typer

T = TypeVar("T")


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """A ValueError is the user's: one line, status 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def end_on_sigterm() -> None:
    """SIGTERM leaves through every `finally`, so that what was started is stopped."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """`uvloop.run`; where `end_on_sigterm` holds, SIGTERM cancels `main` and then leaves.

    An exception out of a signal handler would reach whatever callback runs just then, and a protocol's is swallowed.
    """
    import uvloop

    if signal.getsignal(signal.SIGTERM) is not _exit or threading.current_thread() is not threading.main_thread():
        return uvloop.run(main)
    ended = False

    async def cancelled_by_sigterm() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end(_number: int, _frame: FrameType | None) -> None:
            nonlocal ended
            ended = True
            loop.call_soon_threadsafe(task.cancel)

        signal.signal(signal.SIGTERM, end)
        try:
            return await main
        finally:
            signal.signal(signal.SIGTERM, _exit)

    try:
        return uvloop.run(cancelled_by_sigterm())
    except asyncio.CancelledError:
        if ended:
            sys.exit(128 + signal.SIGTERM)
        raise
