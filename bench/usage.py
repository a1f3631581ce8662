"""Errors of the user: one line, status 2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """A ValueError is the user's: one line, status 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
