"""Real stacks, started through the CLI once for all tests: two replicas in float32, and one small one to overload."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from bench import stack
from bench.connection import Target
from bench.load_client import LoadClient
from bench.stack import Stack

KILLS_THE_STACK = "test_a_killed_command_leaves_no_process"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The test that kills the session's stack comes last, in whatever order files are named."""
    items.sort(key=lambda item: item.name == KILLS_THE_STACK)


@pytest.fixture(scope="session")
def served() -> Iterator[Stack]:
    """Two replicas. float32, so that a text is the same on either replica and in any batch; nothing is shed on a busy machine."""
    running = stack.start(["--replicas", "2", "--dtype", "float32", "--queue-time-slo-s", "120"])
    yield running
    running.stop()


@pytest.fixture
async def client(served: Stack) -> AsyncIterator[LoadClient]:
    made = LoadClient(Target.parse(served.url), timeout_s=120.0)
    yield made
    made.close()
