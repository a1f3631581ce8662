"""Signals for the whole group, as terminals and make send them, reach the one process that drains, once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import signal, subprocess, sys, time
from cluster.foreground import run_apart

def work():
    helper = subprocess.Popen(["sleep", "300"])          # as a process of Ray
    seen = []
    signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    print(helper.pid, flush=True)
    while not seen:
        time.sleep(0.01)
    time.sleep(0.5)                                       # draining
    alive = helper.poll() is None
    helper.kill()
    print(len(seen), alive, flush=True)
    return 7

sys.exit(run_apart(work) if sys.argv[1] == "apart" else work())
"""


def start(how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize(("how", "helper_lives"), [("apart", True), ("together", False)])
def test_a_signal_to_the_group_spares_what_the_drain_needs(how: str, helper_lives: bool) -> None:
    process = start(how)
    assert process.stdout is not None
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # make passes on to its child what the child has had already
    out, _ = process.communicate(timeout=60)
    count, alive = out.split()
    assert alive == str(helper_lives)
    assert process.returncode == 7
    if how == "apart":
        assert count == "1"


def test_the_work_dies_with_its_front() -> None:
    process = start("apart")
    assert process.stdout is not None
    helper = int(process.stdout.readline())
    with open(f"/proc/{helper}/stat") as file:
        worker = int(file.read().rpartition(")")[2].split()[1])
    assert worker != process.pid
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    gone = not Path(f"/proc/{worker}").exists()
    os.kill(helper, signal.SIGKILL)
    process.stdout.close()
    assert gone
