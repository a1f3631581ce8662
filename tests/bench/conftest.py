"""A mock worker for each test that wants one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from bench.connection import Target
from bench.load_client import LoadClient
from bench.mock_openai import Fault, MockServer, Pace
from tests.bench.mock_pair import Pair, StartPair


@pytest.fixture
async def pair() -> AsyncIterator[StartPair]:
    """`await pair(pace=…, fault=…, timeout_s=…, reuse=…)`: started now, ended with the test."""
    started: list[Pair] = []

    async def start(*, pace: Pace | None = None, fault: Fault = Fault.NONE, timeout_s: float = 20.0, reuse: bool = True) -> Pair:
        server = MockServer(pace, fault)
        port = await server.start()
        client = LoadClient(Target("127.0.0.1", port), timeout_s=timeout_s, reuse_connections=reuse)
        started.append(Pair(server, client, port))
        return started[-1]

    yield start
    for each in started:
        each.client.close()
        await each.server.close()
