"""What the router's cost is measured against: mocks of the link that a real router takes for replicas; and what is judged."""

import os

import msgspec

from bench import router_cost
from bench.router_cost import Cost
from tests.bench.mocked_router import NEEDS_SMOLLM2, mocked_router


@NEEDS_SMOLLM2
async def test_a_router_takes_the_mocks_for_replicas() -> None:
    async with mocked_router(3) as (router, client):
        call = router_cost.id_prompts(1, 100, 64)[0]
        streamed = await client.post(call.path, content=call.body)
        whole = await client.post(call.path, content=router_cost.plain(call).body)
        chat = router_cost.chats(1)[0]
        said = await client.post(chat.path, content=chat.body)
        stats = router.stats()
    events = [line for line in streamed.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in msgspec.json.decode(event[6:])["choices"]]
    assert [len(choice["token_ids"]) for choice in choices if choice.get("token_ids")] == [1] * 64, "a token an event"
    assert whole.json()["usage"]["completion_tokens"] == 64
    assert 300 < said.json()["usage"]["prompt_tokens"] < 1_000, "2 kB of words"
    assert stats["index_entries"] > 0, "their blocks are told"
    assert stats["in_flight"] == stats["attempts"] == 0


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
