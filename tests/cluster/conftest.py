"""One cluster for the whole session of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from local_stack import Driver, Stack


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
