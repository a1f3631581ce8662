"""One cluster for the whole session of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from local_stack import Driver, Stack

ENDS_THE_STACK = "test_the_stop_drains_refuses_and_leaves_nothing"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The test that stops the session's stack comes last, in whatever order files are named."""
    items.sort(key=lambda item: item.name == ENDS_THE_STACK)


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
