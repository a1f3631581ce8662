"""What a signal does to `rantang serve` before there is anything to clean up. Imported before all that takes time to import.

Python's own handlers would print a traceback (SIGINT) or say nothing. Whoever installs others takes over, and other commands keep Python's.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

EXIT_INTERRUPTED = 130
INTERRUPTED = "stopped while starting"
NUMBERS = (signal.SIGINT, signal.SIGTERM)


def _say_and_end(_number: int, _frame: FrameType | None) -> None:
    try:
        os.write(2, f"rantang: {INTERRUPTED}\n".encode())
    finally:
        os._exit(EXIT_INTERRUPTED)


if sys.argv[1:2] == ["serve"] and os.path.basename(sys.argv[0]) in ("rantang", "cli.py"):
    for _each in NUMBERS:
        if signal.getsignal(_each) is not signal.SIG_IGN:  # nohup
            signal.signal(_each, _say_and_end)
