"""The application on a real Ray: names, membership, replacement, draining, and a stop that leaves nothing. Runners are mocks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
from local_stack import Driver, Stack, read_stream

from cluster import processes

pytestmark = pytest.mark.cluster

WAIT_S = 90.0


def wait_for(condition: Callable[[], bool], what: str) -> float:
    """Seconds until `condition` held."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < WAIT_S, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - start


def test_the_box_says_where_and_what(stack: Stack) -> None:
    output = stack.output.read_text()
    for part in ("model", "environment", "ray", "replicas", "2 of 2", f"{stack.url}/v1", "smollm2", "KV tokens", "curl "):
        assert part in output
    assert "INFO" not in output and "WARN" not in output


def test_it_answers_through_its_front_door(stack: Stack) -> None:
    assert stack.status("/ready") == 200
    assert stack.status("/health") == 200
    ids, done = read_stream(stack.stream(12))
    assert (len(ids), done) == (12, True)


def test_processes_say_what_they_are(stack: Stack) -> None:
    titles = list(stack.titles().values())
    assert len([title for title in titles if title.startswith("ray::ServeReplica:smollm2:Replica")]) == 2
    assert len([title for title in titles if title.startswith("ray::ServeReplica:smollm2:Router")]) == 1
    assert any("haproxy" in title for title in titles)


def test_routers_and_the_command_import_no_torch(stack: Stack) -> None:
    for pid, title in stack.titles().items():
        if ":Router" in title or "Controller" in title or "HAProxy" in title or "cluster.cli" in title:
            with open(f"/proc/{pid}/maps") as maps:
                assert "libtorch" not in maps.read(), title


def test_the_secret_is_drawn_once(driver: Driver) -> None:
    assert driver.ask("secrets_agree")


def test_scratch_files_are_private(stack: Stack) -> None:
    assert stack.run_directory().stat().st_mode & 0o077 == 0


def test_a_killed_replica_is_replaced_and_its_streams_go_on(stack: Stack, driver: Driver) -> None:
    wait_for(lambda: driver.ask("router_stats")["replicas"] == 2, "two replicas connected")
    before = stack.replica_pids()
    streams = [stack.stream(40) for _ in range(4)]
    os.kill(before[0], signal.SIGKILL)
    for stream in streams:
        ids, done = read_stream(stream)
        assert (len(ids), done) == (40, True)
    wait_for(lambda: len(set(stack.replica_pids()) - set(before)) == 1, "a new replica process")
    wait_for(lambda: driver.ask("router_stats")["replicas"] == 2, "the new replica connected")


def test_a_leaving_replica_drains_and_no_stream_is_lost(stack: Stack, driver: Driver) -> None:
    wait_for(lambda: driver.ask("router_stats")["replicas"] == 2, "two replicas connected")
    tree = {"engine": {"runner": "mock", "mock_step_ms": 40}, "serve": {"port": stack.port, "replicas": 1}}
    pids = stack.replica_pids()
    streams = [stack.stream(100) for _ in range(6)]
    driver.ask("scale", tree=tree)
    for stream in streams:
        ids, done = read_stream(stream)
        assert (len(ids), done) == (100, True)
    wait_for(lambda: len(stack.replica_pids()) == 1, "one replica process left")
    assert set(stack.replica_pids()) <= set(pids), "a change of the number alone restarts nobody"
    wait_for(lambda: driver.ask("router_stats")["replicas"] == 1, "the router has one replica")
    assert stack.status("/ready") == 200
    driver.ask("scale", tree={**tree, "serve": {"port": stack.port, "replicas": 2}})
    wait_for(lambda: driver.ask("router_stats")["replicas"] == 2, "the router has two replicas again")


def test_the_stop_drains_refuses_and_leaves_nothing(stack: Stack) -> None:
    """Last in this file: it ends the session's stack."""
    pids = [process.pid for process in processes.descendants(stack.process.pid)]
    stream = stack.stream(100)
    first = stream.readline()
    assert first.startswith(b"data:")
    results: list[tuple[list[int], bool]] = []
    reader = threading.Thread(target=lambda: results.append(read_stream(stream)))
    reader.start()
    stack.process.send_signal(signal.SIGTERM)
    wait_for(lambda: stack.status("/ready") == 503, "the router says that it takes nothing new")
    assert stack.status("/health") == 200
    reader.join(60)
    assert results and results[0][1], "the running stream ends with [DONE]"
    assert len(results[0][0]) >= 99
    assert stack.process.wait(WAIT_S) == 0
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}") and "ray" in _title(pid)] == []
    assert list(stack.scratch.glob("rantang-*")) == []
    assert "drained" in stack.output.read_text()


def _title(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""
