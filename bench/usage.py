"""How a command ends that the user got wrong, or ended: one line and status 2, or through every `finally`."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

import typer


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
