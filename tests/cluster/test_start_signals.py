"""A signal while `rantang serve` starts ends it at once, in one line, whatever its main thread is in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import processes
from tests.cluster.local_stack import Stack

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, signal, sys, time
from cluster.signals import Signals

def abort():
    os.write(1, b"aborting\\n")
    time.sleep(0.5)
    os._exit(130)

signals = Signals(abort)
signals.install()
if sys.argv[1] != "no thread":
    signals.watch()
if sys.argv[1] == "ray":                       # ray.init sets a handler of its own
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("of Ray"))
if sys.argv[1] == "serving":
    signals.started()
if sys.argv[1] == "taking":
    with signals.taking():
        os.write(1, b"on\\n")
        time.sleep(0.5)
        os.write(1, b"taken\\n")
    time.sleep(0.2)
    signals.go_on()
until_s = time.monotonic() + 3
try:
    os.write(1, b"on\\n")
    while time.monotonic() < until_s and not signals.asked_to_hurry:
        time.sleep(0.1)
        if sys.argv[1] == "fails" and signals.wait(0):
            signals.started()                  # what the signal has broken fails
            os.write(1, b"failed\\n")
except SystemExit:
    signals.give_way()
os.write(1, b"went on\\n")
"""
EARLY = "import sys, time; sys.argv = {}; from cluster import early_exit; print('on', flush=True); time.sleep(60)"


def told(code: str, number: signal.Signals, *arguments: str, times: int = 1) -> tuple[int, str, str]:
    """Status, what it printed after 'on', and its errors."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stdout.readline() == "on\n"
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.2)
    printed, errors = process.communicate(timeout=60)
    return process.returncode, printed, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("how", ["", "ray", "fails"])
def test_the_start_ends_whatever_the_main_thread_is_in(number: signal.Signals, how: str) -> None:
    assert told(SCRIPT, number, how) == (130, "aborting\n", "")


def test_what_is_being_taken_is_known_first_and_nothing_is_taken_later() -> None:
    assert told(SCRIPT, signal.SIGTERM, "taking") == (130, "taken\naborting\n", "")


def test_without_the_thread_it_goes_on() -> None:
    """The control."""
    assert told(SCRIPT, signal.SIGTERM, "no thread") == (0, "went on\n", "")


def test_once_it_serves_a_signal_is_counted_and_ends_nothing() -> None:
    assert told(SCRIPT, signal.SIGTERM, "serving", times=2) == (0, "went on\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_modules_are_imported_too_it_is_one_line(number: signal.Signals) -> None:
    assert told(EARLY.format(["/venv/bin/rantang", "serve"]), number) == (130, "", "rantang: stopped while starting\n")
    status, _, errors = told(EARLY.format(["/venv/bin/rantang", "chat"]), number)
    assert status == -number and "stopped" not in errors, "the control: another command"


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("number", "after", "wait_s"),
    [
        (signal.SIGINT, "", 1.5),
        (signal.SIGTERM, "environment", 0.0),
        (signal.SIGINT, "environment", 1.5),  # in ray.init
        (signal.SIGTERM, "ray ", 0.0),
        (signal.SIGINT, "ray ", 3.0),  # Serve deploys
    ],
)
def test_nothing_is_left_of_a_start_that_was_stopped(number: signal.Signals, after: str, wait_s: float) -> None:
    stack = Stack()
    try:
        until_s = time.monotonic() + 120
        while after not in stack.output.read_text():
            assert time.monotonic() < until_s and stack.process.poll() is None, stack.output.read_text()
            time.sleep(0.02)
        time.sleep(wait_s)
        below = {process.pid for process in processes.living(stack.process.pid)}
        os.killpg(stack.process.pid, number)
        assert stack.process.wait(30) == 130, stack.output.read_text()
        said = stack.output.read_text().splitlines()
        assert said[-1] == "rantang: stopped while starting", said
        assert all(line.startswith(("rantang: ", "model", "environment", "ray", "replicas")) for line in said), said
        assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]
        assert [path.name for path in stack.scratch.iterdir()] == ["output"]
    finally:
        stack.remove()
