"""Real stacks, started through the CLI once for all tests: two replicas in float32, and one small one to overload."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from bench import stack
from bench.connection import Target
from bench.load_client import LoadClient
from bench.stack import Stack


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
