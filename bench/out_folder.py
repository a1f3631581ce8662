"""The folder that results go to, tried before anything is measured: a result that cannot be written is lost."""

from __future__ import annotations

import tempfile
from pathlib import Path


def check_folder(folder: Path) -> None:
    """Made where it is not there. Raises ValueError where no file can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"no result can be written to {folder}: {error.strerror}") from None
