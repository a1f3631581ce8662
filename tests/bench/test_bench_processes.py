"""Finding a stack's processes, their CPU and memory, and the path-of-a-token arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from bench import processes, token_path
from bench.token_path import Window

CHILD = """
import os, subprocess, sys, time
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(daemon.pid, flush=True)
if sys.argv[1] == "leave": sys.exit(0)
x = bytearray(64 * 1024 * 1024)
for i in range(0, len(x), 4096): x[i] = 1
end = time.process_time() + 0.3
while time.process_time() < end: pass
print("ready", flush=True)
time.sleep(60)
"""


def start_child(mode: str, mark: str) -> tuple[subprocess.Popen[str], int]:
    environment = {**os.environ, processes.MARK: mark}
    child = subprocess.Popen([sys.executable, "-c", CHILD, mode], stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None
    return child, int(child.stdout.readline())


def test_family_cpu_and_memory() -> None:
    child, daemon = start_child("stay", "m1")
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        family = processes.family(child.pid)
        assert {child.pid, daemon} == {process.pid for process in family}
        assert processes.usage(family).cpu_s["ray"] >= 0.25
        assert processes.proportional_memory_bytes(family)["ray"] >= 64 * 2**20
        assert processes.alive(family) == family
    finally:
        child.kill()
        child.wait()
        os.kill(daemon, 9)


def test_an_orphan_is_found_by_its_mark_and_only_so() -> None:
    child, daemon = start_child("leave", "m2")
    try:
        child.wait(10)
        assert [process.pid for process in processes.family(child.pid, "m2")] == [daemon]
        assert processes.family(child.pid, "other") == []  # the control: without the mark it would be lost
    finally:
        os.kill(daemon, 9)
    deadline_s = time.monotonic() + 10
    while processes.family(child.pid, "m2") and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert processes.family(child.pid, "m2") == []


def test_idle_load_is_subtracted_in_proportion_to_time() -> None:
    idle = Window({"router": 0.1, "ray": 1.0}, wall_s=10.0, tokens=0)
    busy = Window({"router": 1.1, "ray": 0.5, "haproxy": 0.2}, wall_s=5.0, tokens=10_000)
    assert token_path.microseconds_per_token(idle, busy) == pytest.approx({"router": 105.0, "ray": 0.0, "haproxy": 20.0})
    assert token_path.microseconds_per_token(idle, Window({"router": 1.0}, 5.0, 0)) == {}
