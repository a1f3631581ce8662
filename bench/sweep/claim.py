"""One sweep at a time in one folder: two that share what is finished would write each other's requests under their own loads."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

FILE = "lock"


def claim(folder: Path) -> IO[bytes] | None:
    """The folder, made where it is not there, as this process's own; None: another process has it.

    Until the file is closed, or any other that this process got for the same folder.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            held = (folder / FILE).open("ab")
        except FileNotFoundError:  # whoever had it has just finished, and removed it
            continue
        try:
            fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            held.close()
            return None
        except OSError:  # a file system without locks: nobody can be told apart there
            return held
        if _is_still(held, folder / FILE):
            return held
        held.close()


def _is_still(held: IO[bytes], path: Path) -> bool:
    """Whether the file that is locked is the one that others would find."""
    try:
        return os.path.samestat(os.fstat(held.fileno()), path.stat())
    except FileNotFoundError:
        return False
