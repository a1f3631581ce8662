"""A mock worker and a client of it, as a test gets them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bench.load_client import LoadClient
from bench.mock_openai import MockServer


@dataclass(frozen=True, slots=True)
class Pair:
    """A mock worker and a client of it."""

    server: MockServer
    client: LoadClient
    port: int


StartPair = Callable[..., Awaitable[Pair]]
StartMock = Callable[..., str]
