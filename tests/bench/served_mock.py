"""A mock server on a thread of its own, for commands that run their own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from bench.mock_openai import Fault, MockServer, Pace


@contextlib.contextmanager
def served_mock(pace: Pace | None = None, fault: Fault = Fault.NONE) -> Iterator[str]:
    """Its URL, for the time of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = MockServer(pace, fault)
    try:
        port = asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
