"""`make test`: what needs no Ray in two processes, and the stack of mocks beside it; then what needs the cores, one after another.

    python -m tests.whole_suite [pytest's arguments]

What Python has compiled is kept beside the sources, also where PYTHONDONTWRITEBYTECODE is set: these are hundreds of processes.
The stack of mocks waits most of the time, for Ray and for processes that start, and is not asked for speed. Two stacks that compute, on
two cores, would be a test of the machine. The status is 0, or pytest's of the first part that failed; what comes after it does not run.
SIGINT and SIGTERM interrupt the tests, which end what they have started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

from tests.markers import ALONE, BESIDE_OTHERS, WITHOUT_RAY

NOTHING_CHOSEN = 5  # of pytest: the arguments chose no test of this part
WORKERS = ("-n", "2", "--dist", "worksteal")


def environment(marks: str) -> dict[str, str]:
    """Of one part. Where two processes compute, further threads of either would only wait for one another, and burn time at it."""
    found = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {"OMP_NUM_THREADS": "1", **found} if marks == WITHOUT_RAY else found


def start(marks: str, *arguments: str, output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """In a process group of its own, so that an interrupt reaches the workers of a part too."""
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-m", marks, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment(marks),
        process_group=0,
    )


def statuses(*parts: subprocess.Popen[bytes]) -> list[int]:
    """Of parts that have ended. Interrupted, it passes that on and waits again."""
    while True:
        try:
            return [part.wait() for part in parts]
        except KeyboardInterrupt:
            for part in parts:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(part.pid, signal.SIGINT)


def failure(*parts: subprocess.Popen[bytes]) -> int:
    """The first status that is no success; else 0."""
    return next((status for status in statuses(*parts) if status not in (0, NOTHING_CHOSEN)), 0)


def main(arguments: Sequence[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too, which a shell has what it starts in the background ignore
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryFile() as said:
        beside = start(BESIDE_OTHERS, *arguments, output=said)
        status = failure(start(WITHOUT_RAY, *WORKERS, *arguments), beside)
        said.seek(0)
        sys.stdout.write(said.read().decode(errors="replace"))
        sys.stdout.flush()
    return status or failure(start(ALONE, *arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
