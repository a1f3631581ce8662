"""A team as large as the set of cores it may use keeps each thread to one while it runs, and nobody to any afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels.plain_decoder import BLOCK, POSITIONS, Sequences, Sizes, build, library_or_reason

ISA, REASON = library_or_reason()
pytestmark = [
    pytest.mark.skipif(ISA is None, reason=f"no C++ step here: {REASON}"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core, and two threads need two"),
]
CROWDED_RUNS = 4  # of kernels/cpu/team.h: one that was held up may have been so by chance
LONG = Sizes(hidden=512, heads=8, dim=64, width=1536, layers=2)


@pytest.fixture
def two_cores() -> Iterator[set[int]]:
    before = os.sched_getaffinity(0)
    cores = set(sorted(before)[:2])
    os.sched_setaffinity(0, cores)
    yield cores
    os.sched_setaffinity(0, before)


def sequences_of(threads: int) -> Sequences:
    assert ISA is not None
    return Sequences(build(LONG), ISA, threads=threads)


def seen_while_running(sequences: Sequences) -> tuple[set[str], set[int]]:
    """The lists of cores that this process's threads had during a step, and the caller's afterwards."""
    tokens = [number % LONG.vocab for number in range(POSITIONS // BLOCK * BLOCK)]
    table, seen, done = sequences.table(), set[str](), threading.Event()

    def look() -> None:
        while not done.is_set():
            for status in Path("/proc/self/task").glob("*/status"):
                try:
                    seen.update(line.split()[1] for line in status.read_text().splitlines() if line.startswith("Cpus_allowed_list"))
                except OSError:  # a thread that has ended meanwhile
                    continue

    watch = threading.Thread(target=look)
    watch.start()
    while not seen:
        pass
    sequences.step([(tokens, 0, table)])
    done.set()
    watch.join()
    return seen, os.sched_getaffinity(0)


def test_each_thread_has_a_core_while_it_runs(two_cores: set[int]) -> None:
    seen, afterwards = seen_while_running(sequences_of(threads=2))
    assert {str(core) for core in two_cores} <= seen
    assert afterwards == two_cores


@pytest.mark.parametrize("threads", [1, 3])
def test_a_team_of_another_size_goes_where_linux_puts_it(two_cores: set[int], threads: int) -> None:
    seen, afterwards = seen_while_running(sequences_of(threads))
    assert not {str(core) for core in two_cores} & seen
    assert afterwards == two_cores


def test_a_core_that_others_keep_is_given_up(two_cores: set[int]) -> None:
    sequences, alone = sequences_of(threads=2), {str(core) for core in two_cores}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        for process in busy:
            os.sched_setaffinity(process.pid, {min(two_cores)})
        for _ in range(CROWDED_RUNS):
            assert alone <= seen_while_running(sequences)[0]
        assert not alone & seen_while_running(sequences)[0]
    finally:
        for process in busy:
            process.kill()
            process.wait()
