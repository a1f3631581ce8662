"""Nothing below us is lost from sight, and all of it can be ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from cluster import processes

# A child that starts a grandchild ignoring SIGTERM and then dies, as an actor that leaves its subprocess behind.
ORPHANING = """
import subprocess, sys
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
child.stdout.readline()
print(child.pid, flush=True)
"""

# What `rantang serve` does at its end, in a process of its own: adopt, let a child orphan its own, end all.
ENDING = f"""
import os, subprocess, sys
from cluster import processes
if sys.argv[1] == "adopt":
    processes.adopt_orphans()
orphan = int(subprocess.run([sys.executable, "-c", {ORPHANING!r}], stdout=subprocess.PIPE, text=True).stdout)
print(orphan, processes.end_descendants(os.getpid(), grace_s=0.2))
"""


def run_ending(mode: str) -> tuple[int, int]:
    output = subprocess.run(
        [sys.executable, "-c", ENDING, mode], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": "."}
    )
    orphan, ended = output.stdout.split()
    return int(orphan), int(ended)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_orphan_that_ignores_sigterm_is_ended() -> None:
    orphan, ended = run_ending("adopt")
    assert ended == 1
    assert not alive(orphan)


def test_without_adoption_the_orphan_escapes() -> None:
    """The negative control of the guard above."""
    orphan, ended = run_ending("leave")
    assert ended == 0
    assert alive(orphan)
    os.kill(orphan, 9)


def test_the_tree_lists_parents_before_children() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import subprocess, sys; subprocess.run(['sleep', '300'])"])
    try:
        for _ in range(200):
            below = processes.descendants(os.getpid())
            if [process for process in below if process.parent == child.pid and process.name == "sleep"]:  # not the fork
                break
            time.sleep(0.05)
        pids = [process.pid for process in below]
        grandchild = next(process for process in below if process.parent == child.pid)
        assert pids.index(child.pid) < pids.index(grandchild.pid)
        assert grandchild.name == "sleep"
        table = processes.memory_table(child.pid)
        assert {row.pid for row in table} == {child.pid, grandchild.pid}
        assert all(row.pss_bytes > 0 for row in table)
        os.kill(grandchild.pid, 9)
    finally:
        child.kill()
        child.wait()


def test_one_that_cannot_be_killed_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an uninterruptible wait of the kernel, say, or another user's."""
    stuck = processes.Process(pid=1, parent=0, state="D", name="stuck")

    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(processes, "living", lambda root, but=None: [stuck])
    monkeypatch.setattr(processes, "_KILL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(os, "kill", refuse)
    start = time.monotonic()
    assert processes.end_descendants(os.getpid(), grace_s=0.1) == 1
    assert time.monotonic() - start < 10
