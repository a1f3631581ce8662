"""Replicas of two rank actors over gloo serve; one whose rank is killed or frozen is replaced whole, and its streams go on elsewhere."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from local_stack import Driver, Stack, read_stream

from tests.cluster.tiny_served import write_tiny_served

WAIT_S = 240.0
TOKENS = 400
STREAMS = 4


def wait_until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def ranks(stack: Stack) -> set[int]:
    """Process ids of ranks above 0."""
    return {pid for pid, title in stack.titles().items() if title.startswith("ray::smollm2:Rank1")}


def answers(stack: Stack, when_running: Callable[[], None]) -> list[tuple[list[int], bool]]:
    """Ids of equal greedy streams, and whether each ended well; `when_running` is called when all have begun."""
    got: list[tuple[list[int], bool]] = []
    begun = threading.Barrier(STREAMS + 1)

    def one() -> None:
        response = stack.stream(TOKENS, "/ranks", temperature=0)
        begun.wait(60)
        got.append(read_stream(response))

    threads = [threading.Thread(target=one) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    when_running()
    for thread in threads:
        thread.join()
    return got


@pytest.mark.cluster
@pytest.mark.slow
def test_a_rank_that_is_killed_or_frozen_costs_no_stream_and_leaves_nothing(stack: Stack, driver: Driver, tmp_path: Path) -> None:
    engine = {
        "model": str(write_tiny_served(tmp_path / "model")),
        "tensor_parallel_size": 2,
        "dtype": "float32",
        "num_gpu_blocks_override": 256,
        "num_threads": 1,
        "served_model_name": "smollm2",
    }
    application = {
        "name": "ranks",
        "route_prefix": "/ranks",
        "import_path": "cluster.app:build_from_args",
        "args": {"engine": engine, "router": {"queue_time_slo_s": 300}, "serve": {"replicas": 2}},
    }
    driver.ask("deploy_config", tree={"applications": [application]})
    wait_until(lambda: stack.status("/ranks/ready") == 200 and len(ranks(stack)) == 2, "two replicas of two ranks")
    wait_until(lambda: driver.ask("router_stats", name="ranks")["replicas"] == 2, "the router knows both")
    (expected, whole), *others = answers(stack, lambda: None)
    assert whole and len(expected) == TOKENS
    assert others == [(expected, True)] * (STREAMS - 1)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        before = ranks(stack)
        victim = min(before)
        assert answers(stack, lambda victim=victim, number=number: os.kill(victim, number)) == [(expected, True)] * STREAMS  # type: ignore[misc]
        wait_until(lambda victim=victim: len(ranks(stack) - {victim}) == 2, "a rank in place of the victim")  # type: ignore[misc]
        wait_until(lambda victim=victim: victim not in ranks(stack), "the victim is gone, frozen or not")  # type: ignore[misc]
        wait_until(lambda: driver.ask("router_stats", name="ranks")["replicas"] == 2, "both replicas serve")
    driver.ask("delete", name="ranks")
    wait_until(lambda: not ranks(stack), "no rank outlives its replica")
