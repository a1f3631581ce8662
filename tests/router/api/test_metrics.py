from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.api.metrics import Metrics
from router.app import build_app
from router.config import RouterConfig
from router.ports import Rejected
from tests.router.api.wire import CHAT, COMPLETIONS, HI, RawCall, post, stream, until
from tests.router.fake_backend import FakeBackend, Script, repeat
from tests.router.smollm2 import smollm2

NAMES = {
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:request_success",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions",
    "rantang:requests",
    "rantang:requests_accepted",
    "rantang:requests_in_flight",
    "rantang:requests_invalid",
    "rantang:requests_queued",
    "rantang:stream_moves",
    "rantang:requests_shed",
    "rantang:replicas",
    "rantang:ready",
    "rantang:queue_time_seconds",
    "rantang:slo",
}


async def scrape(client: httpx.AsyncClient) -> dict[str, float]:
    """Values by name, or by name{last label's value} where there are several."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        for sample in family.samples:
            extra = [value for key, value in sorted(sample.labels.items()) if key not in ("model_name", "le")]
            values["/".join([sample.name, *extra])] = sample.value
    return values


async def test_names_are_stable(client: httpx.AsyncClient) -> None:
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    assert {family.name for family in families if not family.name.endswith("_created")} == NAMES


async def test_what_a_request_leaves(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda request: Script(tokens=(28120,) * 5, stop_id=None, cached_tokens=16, queue_time_s=0.25)
    await stream(client, CHAT)
    await post(client, COMPLETIONS)
    values = await scrape(client)
    assert values["vllm:time_to_first_token_seconds_count"] == values["vllm:e2e_request_latency_seconds_count"] == 2
    assert values["vllm:inter_token_latency_seconds_count"] == 8
    assert values["vllm:request_queue_time_seconds_sum"] == 0.5
    assert values["vllm:prompt_tokens_total"] == 32 and values["vllm:generation_tokens_total"] == 10
    assert values["vllm:prefix_cache_hits_total"] == 32 and values["vllm:request_success_total/stop"] == 2


def check_identity(values: dict[str, float]) -> None:
    ended = sum(values[f"rantang:requests_total/{outcome}"] for outcome in ("finished", "aborted", "failed", "shed"))
    assert values["rantang:requests_accepted_total"] == ended + values["rantang:requests_in_flight"]


async def test_every_request_ends_as_one_thing(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """accepted = finished + aborted + failed + shed + in flight, at every moment."""
    await post(client, CHAT)
    backend.script = lambda request: Script(raise_after=0)
    await post(client, CHAT)
    backend.reject = Rejected(429, "queue_time", "busy", 1.0)
    await post(client, CHAT)
    await post(client, CHAT, temperature=9)
    backend.reject, backend.script = None, lambda request: Script(tokens=(28120,) * 1000, delay_s=0.001)
    task = asyncio.create_task(post(client, CHAT))
    await until(lambda: len(backend.sessions) == 3)
    values = await scrape(client)
    check_identity(values)
    assert values["rantang:requests_in_flight"] == 1 and values["rantang:requests_accepted_total"] == 4
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    values = await scrape(client)
    check_identity(values)
    assert [values[f"rantang:requests_total/{name}"] for name in ("finished", "aborted", "failed", "shed")] == [1, 1, 1, 1]
    assert values["rantang:requests_shed_total/queue_time/429"] == 1 and values["rantang:requests_invalid_total/400"] == 1


async def test_gauges_read_zero_after_everyone_left(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """They are computed when read: no traffic is needed to correct them."""
    app = build_app(backend, smollm2(), RouterConfig())
    backend.script = lambda request: Script(tokens=(28120,) * 10_000, delay_s=0.01)
    body = json.dumps({"model": "smollm2", "messages": HI, "stream": True}).encode()
    calls = [RawCall(body) for _ in range(100)]
    tasks = [asyncio.create_task(call.run(app)) for call in calls]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as other, asyncio.timeout(30):
        await until(lambda: len(backend.sessions) == 100)
        assert (await scrape(other))["vllm:num_requests_running"] == 100
        for call in calls:
            call.gone.set()
        await asyncio.gather(*tasks)
        values = await scrape(other)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "rantang:requests_in_flight"):
        assert values[name] == 0
    assert values["rantang:requests_total/aborted"] == 100
    check_identity(values)


async def test_preemptions_are_those_of_the_replicas(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    assert (await scrape(client))["vllm:num_preemptions_total"] == 0
    backend.pool = replace(backend.pool, preemptions=3)
    assert (await scrape(client))["vllm:num_preemptions_total"] == 3


async def test_broken_metrics_do_not_matter(client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    complaints: list[str] = []
    monkeypatch.setattr(Metrics, "complain", lambda self: complaints.append("x"))

    def broken(*args: object) -> None:
        raise RuntimeError("metrics are down")

    monkeypatch.setattr("router.api.tally.Series.observe", broken)
    monkeypatch.setattr("prometheus_client.Counter.inc", broken)
    backend.script = lambda request: repeat(28120, 5)
    assert (await post(client, CHAT)).status_code == 200
    assert complaints and (await scrape(client))["rantang:requests_in_flight"] == 0
