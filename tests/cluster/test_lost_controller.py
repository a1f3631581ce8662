"""Ray's controller is killed under load, again and again for some seconds (FLO-14): who serves goes on with the replicas it knows."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import urllib.error

import pytest
from local_stack import Driver, Stack, read_stream

pytestmark = pytest.mark.cluster

GONE_S = 6.0
WAIT_S = 60.0
TOKENS = 20


def controllers(stack: Stack) -> list[int]:
    return [pid for pid, title in stack.titles().items() if "ServeController" in title]


def ask_on(stack: Stack, until: threading.Event, heard: list[tuple[int, bool] | int]) -> None:
    """One stream after another: what came of each, as (tokens, [DONE]), or as the status of who was not served."""
    while not until.is_set():
        try:
            ids, done = read_stream(stack.stream(TOKENS))
            heard.append((len(ids), done))
        except urllib.error.HTTPError as error:
            heard.append(error.code)


def test_a_killed_controller_is_missed_by_nobody_who_serves(stack: Stack, driver: Driver) -> None:
    before = controllers(stack)
    assert len(before) == 1
    over = threading.Event()
    heard: list[tuple[int, bool] | int] = []
    ready: set[int] = set()
    clients = [threading.Thread(target=ask_on, args=(stack, over, heard)) for _ in range(4)]
    for client in clients:
        client.start()
    end_s = time.monotonic() + GONE_S
    while time.monotonic() < end_s:
        for pid in controllers(stack):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ready.add(stack.status("/ready"))
        time.sleep(0.2)
    over.set()
    for client in clients:
        client.join(WAIT_S)
    assert not any(client.is_alive() for client in clients), "nobody hangs"
    assert len(heard) >= len(clients)
    assert set(heard) == {(TOKENS, True)}
    assert ready == {200}
    assert is_back(stack, driver), "Ray starts another one, which finds what runs"
    assert controllers(stack) != before


def is_back(stack: Stack, driver: Driver) -> bool:
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        if controllers(stack) and driver.ask("application", name="smollm2")["status"] == "RUNNING":
            return True
        time.sleep(0.5)
    return False
