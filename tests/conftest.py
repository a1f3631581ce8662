"""Tests of what meets sockets run on both event loops: Serve's processes run uvloop, whose transports are not asyncio's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

ON_BOTH_LOOPS = ("test_link_handshake", "test_link_stream", "test_replica_server", "test_link_client")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if item.path.stem in ON_BOTH_LOOPS:
        loops["uvloop"] = uvloop.new_event_loop
    return loops
