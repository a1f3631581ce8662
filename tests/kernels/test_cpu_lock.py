"""The lock of a cache's directory: bounded waiting, and gone with whoever held it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.lock import lock_file

TAKE = "f = lock_file(Path(sys.argv[1]), 0); print(flush=True); input()"
HOLDER = f"import sys; from pathlib import Path; from kernels.cpu.lock import lock_file; {TAKE}"


def test_one_at_a_time_until_it_dies(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"\n"
        with pytest.raises(TimeoutError, match=r"kept .*\.lock locked for 0\.1 s"):
            lock_file(path, 0.1)
        holder.kill()
    with lock_file(path, 10), pytest.raises(TimeoutError):
        lock_file(path, 0)
    lock_file(path, 0).close()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lock_file(tmp_path / "none" / ".lock", 0)
