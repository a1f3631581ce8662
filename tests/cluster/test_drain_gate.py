"""The gate before a router's app: closed, it refuses what is new and waits for what runs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from cluster.drain_gate import DrainGate


class Client:
    """Sends one request to an ASGI app and keeps what it answers."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    async def request(self, app: DrainGate, path: str = "/v1/completions") -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            self.messages.append(message)

        await app({"type": "http", "path": path}, receive, send)


async def test_what_runs_finishes_and_what_is_new_is_refused() -> None:
    release = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    gate = DrainGate(app)
    running, late = Client(), Client()
    task = asyncio.create_task(running.request(gate))
    await asyncio.sleep(0)
    assert gate.in_flight == 1
    gate.close()
    assert not await gate.wait_idle(0.01)
    await late.request(gate)
    assert late.status == 503
    assert dict(late.messages[0]["headers"])[b"retry-after"] == b"1"
    release.set()
    assert await gate.wait_idle(5.0)
    await task
    assert running.status == 200


async def test_health_stays_reachable_and_an_error_gives_the_place_back() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/health":
            raise RuntimeError("broken")
        await send({"type": "http.response.start", "status": 200, "headers": []})

    gate = DrainGate(app)
    with contextlib.suppress(RuntimeError):
        await Client().request(gate)
    assert gate.in_flight == 0
    gate.close()
    client = Client()
    await client.request(gate, "/health")
    assert client.status == 200
    assert await gate.wait_idle(0.01)
