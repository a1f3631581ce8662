"""A served stack answers: by hand, through openai-python, and sixty-four at a time."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai
import pytest

from bench import golden, stack
from bench.answer import Expectation
from bench.load_client import Call, LoadClient, json_call
from bench.record import Outcome
from bench.stack import Stack
from tests.end_to_end.idle import seconds_until_idle

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
USAGE = {"include_usage": True}


def test_models_health_ready(served: Stack) -> None:
    models = json.loads(stack.get_text(f"{served.url}/v1/models"))
    assert [model["id"] for model in models["data"]] == ["smollm2"]
    assert stack.get_status(f"{served.url}/health") == 200
    assert stack.get_status(f"{served.url}/ready") == 200


async def test_chat_knows_the_capital_of_france(client: LoadClient) -> None:
    body = {"model": "smollm2", "messages": FRANCE, "max_tokens": 24, "temperature": 0}
    whole = await client.send(json_call("/v1/chat/completions", body, Expectation(stream=False, keep=True)))
    assert whole.outcome is Outcome.COMPLETED, whole.problems
    assert "Paris" in whole.answer.texts[0]
    assert whole.answer.finish_reasons == {0: "stop"}
    stream = {**body, "stream": True, "stream_options": USAGE}
    streamed = await client.send(json_call("/v1/chat/completions", stream, Expectation(keep=True)))
    assert streamed.outcome is Outcome.COMPLETED, streamed.problems
    assert (streamed.answer.texts, streamed.answer.finish_reasons) == (whole.answer.texts, whole.answer.finish_reasons)
    assert streamed.counts.completion_tokens == whole.counts.completion_tokens


def test_openai_python_works_unchanged(served: Stack) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": FRANCE[0]["content"]}], max_tokens=24, temperature=0
        )
        assert "Paris" in (whole.choices[0].message.content or "")
        assert whole.usage is not None and whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        chunks = list(
            client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": FRANCE[0]["content"]}],
                max_tokens=24,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason] == ["stop"]
        assert chunks[-1].usage is not None
        completion = client.completions.create(model="smollm2", prompt="One, two, three,", max_tokens=4, temperature=0)
        assert completion.choices[0].text.strip()
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nothing", prompt="x", max_tokens=1)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="smollm2", prompt="", max_tokens=1)


def mixed_call(i: int) -> Call:
    """Chat and completions, streamed and not, one choice and two, greedy and sampled, short and longer, with stops and without."""
    stream, chat, choices = i % 2 == 0, i % 4 < 2, 2 if i % 8 == 5 else 1
    body: dict[str, object] = {"model": "smollm2", "max_tokens": 4 + i % 24, "n": choices, "temperature": 0 if i % 3 else 0.8, "seed": i}
    if chat:
        body["messages"] = [{"role": "user", "content": f"Tell me something about the number {i}."}]
    else:
        body["prompt"] = f"The number {i} is"
    if i % 5 == 0:
        body["stop"] = [".", "\n"]
    if stream:
        body |= {"stream": True, "stream_options": USAGE, "return_token_ids": True}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return json_call(path, body, Expectation(stream=stream, choices=choices, keep=True))


async def test_sixty_four_mixed_requests_each_end_once(client: LoadClient, served: Stack) -> None:
    """The client's reader checks each: one finish per choice, nothing after it, [DONE], every token in the usage."""
    records = await asyncio.gather(*(client.send(mixed_call(i)) for i in range(64)))
    assert {i: record.problems for i, record in enumerate(records) if record.outcome is not Outcome.COMPLETED} == {}
    assert len({record.answer.id for record in records}) == 64
    assert all(set(record.answer.finish_reasons.values()) <= {"stop", "length"} for record in records)
    assert await seconds_until_idle(served.url) is not None


async def test_recorded_greedy_outputs_are_kept(served: Stack) -> None:
    recorded = golden.load(Path(__file__).parent / "golden_small.json")
    verdicts = await golden.check(served.url, recorded)
    broken = [metric for metric in golden.metrics_of(verdicts, "float32") if metric.holds is False]
    assert broken == [], verdicts


async def test_golden_check_has_teeth(served: Stack) -> None:
    """The control: with one recorded token changed at a clear decision, the same check fails."""
    recorded = golden.load(Path(__file__).parent / "golden_small.json")
    item = recorded.items[0]
    other = golden.GoldenItem(item.number, item.prompt_ids, (item.ids[0] + 1, *item.ids[1:]), item.logprobs, item.gaps_nat, item.text, ())
    verdicts = await golden.check(served.url, golden.Golden(recorded.max_new_tokens, recorded.eos_ids, (other,)))
    assert next(metric.name for metric in golden.metrics_of(verdicts, "float32") if metric.holds is False) == "diverged_beyond_gap"
