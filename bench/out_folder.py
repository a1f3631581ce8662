"""The folder that results go to, tried before anything is measured: a result that cannot be written is lost."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path


def check_folder(folder: Path) -> None:
    """Made where it is not there. Raises ValueError where no file can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"no result can be written to {folder}: {error.strerror}") from None


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Where the folder takes nothing any more (a full disk) the command fails with one line; what it printed is all there is."""
    try:
        yield
    except OSError as error:
        raise SystemExit(f"the result could not be written to {folder}: {error.strerror or error}") from None
