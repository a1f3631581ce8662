"""openai-python, unchanged, over a real server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
import uvicorn

from router.app import build_app
from router.config import RouterConfig
from router.ports import Rejected
from tests.router.api.wire import HI, ids, until
from tests.router.fake_backend import EOS, FakeBackend, Script
from tests.router.smollm2 import smollm2

Served = tuple[FakeBackend, openai.AsyncOpenAI, str]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    backend = FakeBackend(lambda request: Script(tokens=(*ids("Hello 😀 there"), EOS), cached_tokens=16))
    app = build_app(backend, smollm2(), RouterConfig(api_keys=("secret",)))
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", http="httptools", lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
    try:
        yield backend, client, url
    finally:
        await client.close()
        server.should_exit = True
        await task


async def test_chat(served: Served) -> None:
    _, client, _ = served
    answer = await client.chat.completions.create(model="smollm2", messages=HI, logprobs=True, top_logprobs=2)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "Hello 😀 there" and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    stream = await client.chat.completions.create(model="smollm2", messages=HI, stream=True, stream_options={"include_usage": True})  # type: ignore[arg-type]
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello 😀 there"
    assert chunks[-1].usage == answer.usage and chunks[-2].choices[0].finish_reason == "stop"


async def test_completions_and_models(served: Served) -> None:
    _, client, _ = served
    answer = await client.completions.create(model="smollm2", prompt="Hi", echo=True, logprobs=1, n=2)
    assert [choice.text for choice in answer.choices] == ["HiHello 😀 there"] * 2
    stream = await client.completions.create(model="smollm2", prompt="Hi", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello 😀 there"
    assert [model.id async for model in client.models.list()] == ["smollm2"]


async def test_a_stream_read_to_its_end_is_finished_not_aborted(served: Served) -> None:
    """The server reports the end of a response as a disconnect: that is nobody's leaving."""
    _, client, url = served
    for _ in range(20):
        assert await _texts(client) == "Hello 😀 there"
    async with httpx.AsyncClient(base_url=url) as http:
        page = (await http.get("/metrics")).text
    assert 'rantang:requests_total{model_name="smollm2",outcome="finished"} 20.0' in page
    assert 'rantang:requests_total{model_name="smollm2",outcome="aborted"} 0.0' in page


async def test_errors_raise_their_classes(served: Served) -> None:
    backend, client, url = served
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model="smollm2", messages=HI, temperature=9)  # type: ignore[arg-type]
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await create(model="other", messages=HI)  # type: ignore[arg-type]
    with pytest.raises(openai.AuthenticationError):
        await openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
    for status, kind in ((429, openai.RateLimitError), (503, openai.InternalServerError)):
        backend.reject = Rejected(status, "why", "words", 2.0)
        with pytest.raises(kind) as shed:
            await create(model="smollm2", messages=HI, stream=True)  # type: ignore[arg-type,call-overload]
        assert shed.value.code == "why" and shed.value.response.headers["retry-after"] == "2"
    backend.reject = None
    backend.script = lambda request: Script(tokens=(28120,) * 9, raise_after=5)
    stream = await create(model="smollm2", messages=HI, stream=True)  # type: ignore[arg-type]
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass


async def test_a_real_disconnect_reaches_the_backend(served: Served) -> None:
    backend, client, _ = served
    backend.script = lambda request: Script(tokens=(28120,) * 100_000, delay_s=0.002)
    stream = await client.chat.completions.create(model="smollm2", messages=HI, stream=True)  # type: ignore[arg-type]
    async for _ in stream:
        break
    await stream.close()
    await until(lambda: backend.sessions[0].closed)
    assert backend.running == 0


async def test_long_prompts_do_not_hold_up_others(served: Served) -> None:
    """Ten prompts of 4 MB and four that must really be encoded, beside a stream and /health."""
    backend, client, url = served
    backend.script = lambda request: Script(tokens=(28120,) * 60, stop_id=None, delay_s=0.01)
    headers = {"authorization": "Bearer secret", "content-type": "application/json"}
    slow = [json.dumps({"model": "smollm2", "prompt": text}).encode() for text in ["word " * 800_000] * 10 + ["a-b." * 20_000] * 4]
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
        stream = asyncio.create_task(_texts(client))
        posts = [asyncio.create_task(http.post("/v1/completions", content=body)) for body in slow]
        worst = 0.0
        while not all(post.done() for post in posts):
            started = time.perf_counter()
            assert (await http.get("/health")).status_code == 200
            worst = max(worst, time.perf_counter() - started)
            await asyncio.sleep(0.02)
        assert {(await post).status_code for post in posts} == {400}
        assert {(await post).json()["error"]["code"] for post in posts} == {"context_length_exceeded"}
        assert await stream == "hello" * 60
    assert worst < 5  # generous; the client's own sending is in it


async def _texts(client: openai.AsyncOpenAI) -> str:
    stream = await client.chat.completions.create(model="smollm2", messages=HI, stream=True)  # type: ignore[arg-type]
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
