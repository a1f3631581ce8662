"""The guardian ends what it was told of when its writer dies, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from cluster.guardian import GRACE_S, Guardian, start_of

# A process that guards a child, says who is who, and then waits to be killed, or leaves in good order.
GUARDED = """
import subprocess, sys, time
from cluster.guardian import Guardian
null = subprocess.DEVNULL
child = subprocess.Popen(["sleep", "300"], stdin=null, stdout=null, stderr=null, start_new_session=True)
guardian = Guardian()
guardian.watch([child.pid])
print(child.pid, guardian.pid, flush=True)
if sys.argv[1] == "dismiss":
    guardian.dismiss()
else:
    time.sleep(300)
"""


def gone_within(pid: int, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while start_of(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    return start_of(pid) is None


@pytest.mark.parametrize("how", ["killed", "dismiss"])
def test_the_child_of_a_killed_process_is_ended_and_of_a_dismissed_guardian_it_is_not(how: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", GUARDED, how], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."}
    )
    assert process.stdout is not None
    child, guardian = (int(part) for part in process.stdout.readline().split())
    process.stdout.close()
    if how == "killed":
        process.kill()
    process.wait(30)
    assert gone_within(guardian, 30.0)
    if how == "killed":
        assert gone_within(child, 30.0)
    else:
        assert start_of(child) is not None
        os.kill(child, signal.SIGKILL)


def test_a_pid_used_again_is_not_mistaken() -> None:
    guardian = Guardian()
    other = subprocess.Popen(["sleep", "300"])
    try:
        guardian._write(f"{other.pid}:1")
        guardian._close()
        assert gone_within(guardian.pid, GRACE_S + 30.0)
        assert start_of(other.pid) is not None
    finally:
        other.kill()
        other.wait()
        guardian._process.wait()


def test_a_guardian_that_is_gone_does_not_disturb() -> None:
    guardian = Guardian()
    guardian._process.kill()
    guardian._process.wait()
    guardian.watch([os.getpid()])
    guardian.watch([])
    guardian.dismiss()
