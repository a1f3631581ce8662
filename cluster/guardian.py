"""Ends what a killed `rantang serve` leaves behind. Run as a script of its own: standard library only, no import of ours.

It reads lines from stdin, each the whole list of processes ("pid:start …", start as in /proc/PID/stat, so that a pid used
again is not mistaken). When stdin ends without a last line "done", whoever wrote is dead: after a grace, in which most
of Ray ends by itself, the listed processes are killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

GRACE_S = 4.0
DONE = "done"


class Guardian:
    """The writer's end: the process that is guarded holds one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-IS", os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is not for it
            text=True,
        )
        self._written = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, pids: Iterable[int]) -> None:
        """From now on these, and only these, are to be ended if this process dies."""
        line = " ".join(f"{pid}:{start}" for pid in sorted(pids) if (start := start_of(pid)) is not None)
        if line != self._written:
            self._written = line
            self._write(line)

    def dismiss(self) -> None:
        """All is ended already. Idempotent."""
        if self._process.poll() is None:
            self._write(DONE)
            self._close()
            self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it was killed: then nothing guards, which is no reason to stop serving

    def _close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()


def start_of(pid: int) -> str | None:
    """When the process began, in clock ticks since boot; None if there is none or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def main() -> None:
    last = ""
    for line in sys.stdin:
        last = line.strip()
    if last == DONE:
        return
    time.sleep(GRACE_S)
    for entry in last.split():
        pid, _, start = entry.partition(":")
        if start_of(int(pid)) == start:
            os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    main()
