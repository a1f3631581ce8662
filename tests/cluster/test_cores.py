"""Threads are divided, never oversubscribed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.cores import threads_per_replica, usable_cores


@pytest.mark.parametrize(
    ("cores", "replicas", "reserved", "threads"),
    [(2, 1, 0.0, 2), (2, 2, 0.0, 1), (2, 8, 0.0, 1), (16, 3, 0.0, 5), (64, 2, 4.0, 4), (64, 2, 0.5, 1), (2, 1, 100.0, 2)],
)
def test_threads(cores: int, replicas: int, reserved: float, threads: int) -> None:
    assert threads_per_replica(cores, replicas, reserved) == threads


def test_a_container_quota_counts(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    quota = tmp_path / "cpu.max"
    for text, expected in [
        ("max 100000", cores),
        ("100000 100000", 1),
        ("50000 100000", 1),
        (f"{(cores + 3) * 100000} 100000", cores),
        ("?", cores),
    ]:
        quota.write_text(text)
        assert usable_cores(quota) == expected
    assert usable_cores(tmp_path / "none") == cores


def test_an_engine_yields_and_never_raises_itself() -> None:
    """In processes of their own: what was lowered cannot be raised again."""
    code = "import os, sys; from cluster.cores import yield_to_others; os.nice(int(sys.argv[1])); print(yield_to_others(10), os.nice(0))"
    own = os.nice(0)
    for first in (0, 3, 15):
        command = [sys.executable, "-c", code, str(first)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=Path(__file__).parents[2]).stdout
        expected = max(own + first, 10)
        assert printed.split() == [str(min(expected, 19))] * 2
