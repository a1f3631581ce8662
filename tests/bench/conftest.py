"""A mock worker for each test that wants one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from bench.connection import Target
from bench.load_client import LoadClient
from bench.mock_openai import Fault, MockServer, Pace
from tests.bench.mock_pair import Pair, StartMock, StartPair


@pytest.fixture
async def pair() -> AsyncIterator[StartPair]:
    """`await pair(pace=…, fault=…, timeout_s=…, reuse=…)`: started now, ended with the test."""
    started: list[Pair] = []

    async def start(
        *, pace: Pace | None = None, fault: Fault = Fault.NONE, timeout_s: float = 20.0, reuse: bool = True, obey: bool = False
    ) -> Pair:
        server = MockServer(pace, fault)
        port = await server.start()
        client = LoadClient(Target("127.0.0.1", port), timeout_s=timeout_s, reuse_connections=reuse, obey_retry_after=obey)
        started.append(Pair(server, client, port))
        return started[-1]

    yield start
    for each in started:
        each.client.close()
        await each.server.close()


@pytest.fixture
def mock_url() -> Iterator[StartMock]:
    """`mock_url(pace=…, fault=…)`: a mock worker in a thread of its own, for what runs a loop of its own."""
    ends: list[Callable[[], None]] = []

    def start(pace: Pace | None = None, fault: Fault = Fault.NONE) -> str:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        server = MockServer(pace, fault)
        port = asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)

        def end() -> None:
            asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()

        ends.append(end)
        return f"http://127.0.0.1:{port}"

    yield start
    for end in ends:
        end()
