"""`make test`: what needs no Ray in two processes, and the stack of mocks beside it; then what needs the cores, one after another, and
beside it, with what it leaves of them, what is patient.

    python -m tests.whole_suite [pytest's arguments]

What Python has compiled is kept beside the sources, also where PYTHONDONTWRITEBYTECODE is set: these are hundreds of processes.
The stack of mocks waits most of the time, for Ray and for processes that start, and is not asked for speed. Two stacks that compute, on
two cores, would be a test of the machine. But they wait too, for processes that start and end: meanwhile tests that only compute go on,
in processes that get a core only while nobody else wants it, until these have ended. The status is 0, or pytest's of the first part that
failed; what comes after it does not run.
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
from pathlib import Path
from typing import IO

from tests.markers import ALONE, BESIDE_OTHERS, PATIENT, WITHOUT_RAY

NOTHING_CHOSEN = 5  # of pytest: the arguments chose no test of this part
WORKERS = ("-n", "2", "--dist", "worksteal")
IN_TWO_PROCESSES = (WITHOUT_RAY, PATIENT)


def environment(marks: str) -> dict[str, str]:
    """Of one part. Where two processes compute, further threads of either would only wait for one another, and burn time at it."""
    found = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {"OMP_NUM_THREADS": "1", **found} if marks in IN_TWO_PROCESSES else found


def yield_the_cores() -> None:
    """This process and what it starts run while nobody else wants to; so does its session, where a kernel shares cores between sessions."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")


def start(marks: str, *arguments: str, output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """In a session of its own, so that an interrupt reaches the workers of a part too."""
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-m", marks, *(WORKERS if marks in IN_TWO_PROCESSES else ()), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment(marks),
        start_new_session=True,
        preexec_fn=yield_the_cores if marks == PATIENT else None,
    )


def want_the_cores(part: subprocess.Popen[bytes]) -> None:
    """A part that has yielded the cores asks for them as anybody does, or a busy machine would keep it waiting for ever.

    Where the kernel lets nobody come back (without CAP_SYS_NICE, or `ulimit -e 20`), it goes on with what others leave.
    """
    with contextlib.suppress(OSError):
        Path(f"/proc/{part.pid}/autogroup").write_text("0")
    for thread in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended, or it may not
            session = int(thread.read_text().rpartition(")")[2].split()[3])
            if session == part.pid:
                os.sched_setscheduler(int(thread.parent.name), os.SCHED_OTHER, os.sched_param(0))


def statuses(first: subprocess.Popen[bytes], *beside: subprocess.Popen[bytes]) -> list[int]:
    """Of parts that have ended; who ran beside the first gets its cores. Interrupted, it passes that on and waits again."""
    parts = (first, *beside)
    while True:
        try:
            first.wait()
            for part in beside:
                want_the_cores(part)
            return [part.wait() for part in parts]
        except KeyboardInterrupt:
            for part in parts:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(part.pid, signal.SIGINT)


def failure(*parts: subprocess.Popen[bytes]) -> int:
    """The first status that is no success; else 0."""
    return next((status for status in statuses(*parts) if status not in (0, NOTHING_CHOSEN)), 0)


def together(first: str, second: str, *arguments: str) -> int:
    """Two parts at once: the first status that is no success. What the second says comes when both have ended."""
    with tempfile.TemporaryFile() as said:
        beside = start(second, *arguments, output=said)
        status = failure(start(first, *arguments), beside)
        said.seek(0)
        sys.stdout.write(said.read().decode(errors="replace"))
        sys.stdout.flush()
    return status


def main(arguments: Sequence[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too, which a shell has what it starts in the background ignore
        signal.signal(number, signal.default_int_handler)
    return together(WITHOUT_RAY, BESIDE_OTHERS, *arguments) or together(ALONE, PATIENT, *arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
