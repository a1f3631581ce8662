"""What is started through `mortal` dies with its parent, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.mortal import mortal


def running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_wrapped_program_dies_with_its_parent(tmp_path: Path, wrapped: bool) -> None:
    """How HAProxy is tied to the actor that starts it; unwrapped, the negative control, it lives on."""
    sleep = Path("/bin/sleep")
    program = mortal(sleep, tmp_path / "wrapper") if wrapped else sleep
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([{str(program)!r}, '300'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "time.sleep(1.0)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        with open(f"/proc/{child}/comm") as file:
            assert file.read().strip() == "sleep"
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + (10.0 if wrapped else 0.5)
        while running(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert running(child) is not wrapped
    finally:
        parent.stdout.close()
        if running(child):
            os.kill(child, signal.SIGKILL)
