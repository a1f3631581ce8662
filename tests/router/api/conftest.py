from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from router.app import build_app
from router.config import RouterConfig
from tests.router.fake_backend import FakeBackend
from tests.router.smollm2 import smollm2


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(backend, smollm2(), RouterConfig())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as opened:
        yield opened
