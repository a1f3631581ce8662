"""One process at a time in a directory of the user's cache."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import IO

LOOK_EVERY_S = 0.05


def lock_file(path: Path, wait_s: float) -> IO[str]:
    """The file at `path`, locked until it is closed or the process dies.

    Raises TimeoutError when somebody else has it for longer than `wait_s`, another OSError when it cannot be written or locked.
    """
    deadline = time.monotonic() + wait_s
    file = path.open("a")
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"another process has kept {path} locked for {wait_s:g} s") from None
            time.sleep(LOOK_EVERY_S)
    except BaseException:
        file.close()
        raise
