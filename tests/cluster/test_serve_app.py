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


def test_a_rolling_update_loses_no_stream(stack: Stack, driver: Driver) -> None:
    """Serve awaits a replica's `__del__`, where it drains: streams finish there or move."""
    wait_for(lambda: driver.ask("router_stats")["replicas"] == 2, "two replicas connected")
    before = stack.replica_pids()
    streams = [stack.stream(100) for _ in range(6)]
    driver.ask("redeploy", tree={"engine": {"runner": "mock", "mock_step_ms": 40}, "serve": {"port": stack.port}})
    for stream in streams:
        ids, done = read_stream(stream)
        assert (len(ids), done) == (100, True)
    wait_for(lambda: not set(stack.replica_pids()) & set(before), "every replica process is a new one")
    wait_for(lambda: stack.status("/ready") == 200 and driver.ask("router_stats")["replicas"] == 2, "two replicas connected")


def test_scaling_down_restarts_nobody_and_drains_the_one_that_leaves(stack: Stack, driver: Driver) -> None:
    """As on Kubernetes: the number of the Replica deployment in serveConfigV2 changes, nothing else."""
    args = {"engine": {"runner": "mock", "mock_step_ms": 40, "served_model_name": "smollm2"}}
    application = {"name": "scaled", "route_prefix": "/scaled", "import_path": "cluster.app:build_from_args", "args": args}

    def pids() -> set[int]:
        return {pid for pid, title in stack.titles().items() if title.startswith("ray::ServeReplica:scaled:Replica")}

    def deploy(replicas: int) -> None:
        tree = {"applications": [application | {"deployments": [{"name": "Replica", "num_replicas": replicas}]}]}
        driver.ask("deploy_config", tree=tree)

    deploy(2)
    wait_for(lambda: driver.ask("application", name="scaled")["status"] == "RUNNING", "the application runs")
    wait_for(lambda: stack.status("/scaled/ready") == 200 and driver.ask("router_stats", name="scaled")["replicas"] == 2, "two replicas")
    before = pids()
    streams = [stack.stream(100, prefix="/scaled") for _ in range(6)]
    deploy(1)
    for stream in streams:
        ids, done = read_stream(stream)
        assert (len(ids), done) == (100, True)
    wait_for(lambda: len(pids()) == 1, "one replica process left")
    assert pids() < before
    wait_for(lambda: driver.ask("router_stats", name="scaled")["replicas"] == 1, "the router has one replica")
    driver.ask("delete", name="scaled")


def test_the_stop_drains_refuses_and_leaves_nothing(stack: Stack, driver: Driver) -> None:
    """Ends the session's stack: conftest puts it last of those that need it."""
    driver.close()
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
