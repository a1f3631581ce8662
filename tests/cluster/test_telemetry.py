"""One event is one line; the same event cannot flood the log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from cluster.telemetry import BURST, EVENTS_MAX, PERIOD_S, RateLimit

ROOT = Path(__file__).parents[2]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def passes(limit: RateLimit, event: str) -> dict[str, object] | None:
    try:
        return dict(limit(None, "info", {"event": event}))
    except structlog.DropEvent:
        return None


def test_a_burst_passes_then_silence_then_a_count() -> None:
    clock = Clock()
    limit = RateLimit(clock)
    assert [passes(limit, "a") is not None for _ in range(BURST + 30)] == [True] * BURST + [False] * 30
    assert passes(limit, "b") is not None  # another event is not affected
    clock.now = PERIOD_S
    assert passes(limit, "a") == {"event": "a", "left_out": 30}
    assert passes(limit, "a") == {"event": "a"}


def test_what_is_remembered_is_bounded() -> None:
    limit = RateLimit(Clock())
    for number in range(EVENTS_MAX * 3):
        passes(limit, f"event {number}")
    assert len(limit._windows) == EVENTS_MAX


@pytest.mark.parametrize("level", ["info", "warning"])
def test_lines_are_json_with_the_process_even_where_print_is_replaced(level: str) -> None:
    code = (
        "import builtins, sys; builtins.print = lambda *a, **k: None; sys.stderr = None\n"
        "from cluster.config import ServeConfig; from cluster import telemetry\n"
        f"telemetry.configure(ServeConfig(log_level={level!r}), process='router x')\n"
        "telemetry.logger().bind(model='m').info('quiet one', n=1)\n"
        "telemetry.logger().bind(model='m').warning('loud one', n=2)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True
    )
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert [line["event"] for line in lines] == (["quiet one", "loud one"] if level == "info" else ["loud one"])
    assert lines[-1] | {"timestamp": ""} == {
        "event": "loud one",
        "level": "warning",
        "model": "m",
        "n": 2,
        "process": "router x",
        "timestamp": "",
    }
