"""Requests with one prefix meet on one replica; a client that hangs up frees what it held."""

from __future__ import annotations

import asyncio
import random

import pytest

from bench.load_client import Call, LoadClient
from bench.metrics_page import RUNNING
from bench.prompt_style import PromptStyle, completion, random_ids
from bench.record import Outcome
from bench.stack import Stack
from tests.end_to_end.idle import page, seconds_until_idle

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

STYLE = PromptStyle("smollm2")
BLOCK = 16


async def test_the_second_of_a_prefix_finds_it_cached(client: LoadClient) -> None:
    """Six prefixes: by chance alone all six pairs would meet on one of two replicas once in 64 runs."""
    draw = random.Random("prefixes")
    for _ in range(6):
        prefix = random_ids(draw, 600)
        first = await client.send(completion(prefix + random_ids(draw, 20), 4, STYLE))
        second = await client.send(completion(prefix + random_ids(draw, 20), 4, STYLE))
        assert (first.outcome, second.outcome) == (Outcome.COMPLETED, Outcome.COMPLETED)
        assert first.counts.cached_tokens == 0
        assert second.counts.cached_tokens == 600 // BLOCK * BLOCK


async def test_control_another_prefix_finds_nothing(client: LoadClient) -> None:
    draw = random.Random("other prefixes")
    records = [await client.send(completion(random_ids(draw, 600), 4, STYLE)) for _ in range(2)]
    assert [record.counts.cached_tokens for record in records] == [0, 0]


async def test_disconnects_free_their_work(client: LoadClient, served: Stack) -> None:
    draw = random.Random("disconnect")
    calls = [completion(random_ids(draw, 64), 4000, STYLE) for _ in range(8)]
    streams = [asyncio.create_task(client.send(Call(call.path, call.body, cancel_after_s=3.0))) for call in calls]
    await asyncio.sleep(2.0)
    assert (await asyncio.to_thread(page, served.url)).values[RUNNING] > 0
    records = await asyncio.gather(*streams)
    assert {record.outcome for record in records} == {Outcome.CANCELLED}
    assert await seconds_until_idle(served.url) is not None, "4,000 tokens each would take minutes: these streams still run"
