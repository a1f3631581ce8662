"""Threads are divided, never oversubscribed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.cores import threads_per_replica, usable_cores


@pytest.mark.parametrize(
    ("cores", "replicas", "reserved", "threads"),
    [(2, 1, 0.0, 2), (2, 2, 0.0, 1), (2, 8, 0.0, 1), (16, 3, 0.0, 5), (64, 2, 4.0, 4), (64, 2, 0.5, 1)],
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
