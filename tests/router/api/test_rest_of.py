"""A coroutine begun by hand goes on as if it had been awaited from its start."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from starlette.types import Message

from router.api import body as body_module
from router.api.body import BodyBudget, read_json_body
from router.api.rest_of import RestOf


def begun(coroutine: Coroutine[Any, Any, str]) -> RestOf[str]:
    return RestOf(coroutine, coroutine.send(None))


async def steps(seen: list[str]) -> str:
    await asyncio.sleep(0)
    seen.append("first")
    try:
        await asyncio.sleep(0.005)
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)
    except asyncio.CancelledError:
        seen.append("cancelled")
        await asyncio.sleep(0.005)  # it may wait before it goes
        seen.append("gone")
        raise
    return "done"


async def test_the_rest_is_awaited_as_the_whole_would_be() -> None:
    seen: list[str] = []
    assert await begun(steps(seen)) == "done"
    assert seen == ["first"]


async def test_an_error_comes_out() -> None:
    async def failing() -> str:
        await asyncio.sleep(0)
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        await begun(failing())


async def test_a_cancellation_reaches_it_wherever_it_waits() -> None:
    async def waiting() -> str:
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            seen.append("cancelled at once")
            raise
        return "never"

    seen: list[str] = []
    for coroutine, at_s in ((waiting, 0.0), (lambda: steps(seen), 0.002)):

        async def whole(coroutine: Any = coroutine) -> str:
            return await begun(coroutine())

        task = asyncio.create_task(whole())
        await asyncio.sleep(at_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert seen == ["cancelled at once", "first", "cancelled", "gone"]


async def test_a_body_that_is_there_starts_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[float | None] = []
    timeout = asyncio.timeout

    def counted(delay: float | None) -> asyncio.Timeout:
        timers.append(delay)
        return timeout(delay)

    monkeypatch.setattr(body_module.asyncio, "timeout", counted)  # type: ignore[attr-defined]

    async def there() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def late() -> Message:
        await asyncio.sleep(0)
        return await there()

    assert await read_json_body(there, {}, BodyBudget()) == b"{}" and not timers
    assert await read_json_body(late, {}, BodyBudget()) == b"{}" and len(timers) == 1, "the control: what is waited for has its bound"
