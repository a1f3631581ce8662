"""One cluster for the whole session of tests, and one of several nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_stack import ROOT, Driver, Stack

from tests.cluster.tiny_served import chat_body, write_tiny_chat

ENDS_THE_STACK = "test_the_stop_drains_refuses_and_leaves_nothing"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the session's stack come first, the one that stops it last of them: a Ray of its own then has the cores for itself."""

    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        uses_the_stack = item.path.parent == here and "stack" in getattr(item, "fixturenames", ())
        return 1 if item.name == ENDS_THE_STACK else 0 if uses_the_stack else 2

    items.sort(key=place)


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    one = Stack("--replicas", "2")
    try:
        one.wait_ready()
        yield one
    finally:
        one.remove()


@pytest.fixture(scope="session")
def driver(stack: Stack) -> Iterator[Driver]:
    one = Driver(stack)
    yield one
    one.close()


@pytest.fixture(scope="session")
def on_nodes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What happened on a Ray of three raylets (nodes_driver.py), and `model`, which was served there. The Ray is gone."""
    model = write_tiny_chat(tmp_path_factory.mktemp("tiny") / "model")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(Path(__file__).with_name("nodes_driver.py")), str(model), json.dumps(chat_body())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"model": str(model)}
