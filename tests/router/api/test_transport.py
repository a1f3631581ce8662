"""What arrives: sizes, times, framings, headers."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from starlette.types import Message

from router.api import body as body_module
from router.api.body import BodyBudget, read_json_body
from router.api.errors import ApiError
from router.api.limits import BODY_BYTES_MAX, BODY_BYTES_UNCOUNTED
from router.app import build_app
from router.config import RouterConfig
from tests.router.api.wire import CHAT, HI, RawCall, error_of, post
from tests.router.fake_backend import FakeBackend
from tests.router.smollm2 import smollm2

MIB = 1024 * 1024


async def test_a_body_too_large_by_its_own_word(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, content=b"x" * (BODY_BYTES_MAX + 1), headers={"content-type": "application/json"})
    assert response.status_code == 413 and error_of(response)["code"] == "body_too_large"


async def test_a_chunked_body_without_end_is_cut_at_the_limit() -> None:
    served = 0

    async def receive() -> Message:
        nonlocal served
        served += 64 * 1024
        return {"type": "http.request", "body": b" " * 64 * 1024, "more_body": True}

    with pytest.raises(ApiError) as caught:
        await read_json_body(receive, {}, BodyBudget())
    assert caught.value.status == 413 and served <= BODY_BYTES_MAX + 64 * 1024


async def test_the_largest_body_is_read(client: httpx.AsyncClient) -> None:
    body = json.dumps({"model": "smollm2", "messages": HI}).encode()
    padded = body[:-1] + b" " * (BODY_BYTES_MAX - len(body)) + b"}"
    assert (await client.post(CHAT, content=padded, headers={"content-type": "application/json"})).status_code == 200


async def test_every_framing_gets_the_same_answer(backend: FakeBackend) -> None:
    app = build_app(backend, smollm2(), RouterConfig())
    body = json.dumps({"model": "smollm2", "messages": HI, "tools": [{"x": "d" * 200}] * 64}).encode()
    good = json.dumps({"model": "smollm2", "messages": HI, "metadata": {"x": "d" * 20_000}}).encode()
    for content, status in ((body, 400), (good, 200)):
        for size in (7, 1000, len(content)):
            call = RawCall(b"", chunks=[content[i : i + size] for i in range(0, len(content), size)])
            await call.run(app)
            assert call.status == status


async def test_a_slow_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "BODY_SECONDS_MAX", 0.05)

    async def receive() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b" ", "more_body": True}

    budget = BodyBudget()
    with pytest.raises(ApiError) as caught:
        await read_json_body(receive, {}, budget)
    assert caught.value.status == 408 and budget.held_bytes == 0


async def test_bodies_being_read_share_a_budget() -> None:
    """Six bodies of 8 MiB at once: reading pauses, at most the budget is held, and all arrive in the end."""
    budget = BodyBudget()
    most = 0

    def body() -> tuple[object, list[int]]:
        left = [BODY_BYTES_MAX // (64 * 1024)]

        async def receive() -> Message:
            nonlocal most
            await asyncio.sleep(0)
            most = max(most, budget.held_bytes)
            left[0] -= 1
            return {"type": "http.request", "body": b"x" * 64 * 1024, "more_body": left[0] > 0}

        return receive, left

    receivers = [body()[0] for _ in range(6)]
    done = await asyncio.wait_for(asyncio.gather(*(read_json_body(receive, {}, budget) for receive in receivers)), 30)  # type: ignore[arg-type]
    assert all(len(content) == BODY_BYTES_MAX for content in done)
    assert 24 * MIB < most <= budget.limit_bytes and budget.held_bytes == 0


async def test_a_used_up_budget_does_not_stop_ordinary_requests() -> None:
    budget = BodyBudget()
    hogs = [budget.begin() for _ in range(4)]
    for hog in hogs[:3]:
        await budget.take(hog, BODY_BYTES_MAX)
    await budget.take(hogs[3], BODY_BYTES_MAX)  # the one reader that may use the room kept back
    other = budget.begin()
    with pytest.raises(TimeoutError):  # a further large body waits
        await asyncio.wait_for(budget.take(other, 1), 0.02)

    async def small() -> Message:
        return {"type": "http.request", "body": b"x" * BODY_BYTES_UNCOUNTED, "more_body": False}

    assert len(await asyncio.wait_for(read_json_body(small, {}, budget), 5)) == BODY_BYTES_UNCOUNTED
    waiting = asyncio.create_task(budget.take(other, 1))
    budget.end(hogs[0])
    await asyncio.wait_for(waiting, 5)


async def test_header_limits(client: httpx.AsyncClient) -> None:
    many = {f"x-{i}": "1" for i in range(101)}
    for headers in (many, {"x-long": "y" * 64 * 1024}):
        for path in ("/health", "/v1/models"):
            response = await client.get(path, headers=headers)
            assert response.status_code == 431
            error_of(response)
    assert (await client.get("/health", headers={"x-long": "y" * 60 * 1024})).status_code == 200


async def test_encodings_and_types(client: httpx.AsyncClient) -> None:
    body = json.dumps({"model": "smollm2", "messages": HI}).encode()
    for headers, status in (
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "text/plain"}, 415),  # a page of another origin could send this unasked
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({}, 200),
    ):
        response = await client.post(CHAT, content=body, headers=headers)
        assert response.status_code == status
        assert "access-control-allow-origin" not in response.headers


async def test_request_ids(client: httpx.AsyncClient) -> None:
    given = await client.get("/health", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    for bad in ("x" * 129, "a\tb"):
        replaced = await client.get("/health", headers={"x-request-id": bad})
        assert len(replaced.headers["x-request-id"]) == 32
    for path in ("/nowhere", CHAT):  # errors have one too
        assert (await client.get(path, headers={"x-request-id": "abc-2"})).headers["x-request-id"] == "abc-2"
    assert (await post(client, CHAT, stream=True)).headers["x-request-id"]


async def test_the_queue_time_header(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    body = {"model": "smollm2", "messages": HI}
    await client.post(CHAT, json=body, headers={"x-queue-time-slo-ms": "1500"})
    assert backend.batches[-1].queue_time_slo_s == 1.5
    await client.post(CHAT, json=body)
    assert backend.batches[-1].queue_time_slo_s is None
    for bad in ("0", "-1", "nan", "inf", "x", "1e9"):
        assert (await client.post(CHAT, json=body, headers={"x-queue-time-slo-ms": bad})).status_code == 400


async def test_too_many_waiting_texts_are_refused() -> None:
    import threading

    from router.api.text_pool import TextPool

    pool = TextPool(running_max=1, waiting_max=1)
    release = threading.Event()
    jobs = [asyncio.create_task(pool.run(lambda: release.wait(10))) for _ in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(ApiError) as caught:
        await pool.run(lambda: None)
    assert caught.value.status == 429 and caught.value.retry_after_s
    release.set()
    await asyncio.gather(*jobs)
    assert await pool.run(lambda: 5) == 5
