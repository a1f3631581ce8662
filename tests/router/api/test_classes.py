"""Classes, tenants, overrides, decisions and predictions over HTTP."""

from __future__ import annotations

import httpx
import pytest
from pydantic import ValidationError

from replica.contract.messages import FinishReason
from router.app import build_app
from router.config import ClassConfig, RouterConfig, TenantConfig
from router.policy.classes import Terms
from router.policy.prediction import Prediction
from router.ports import Account, Delta, Failure, Rejected, Total
from tests.router.api.wire import CHAT, HI, post, stream
from tests.router.fake_backend import FakeBackend, FakeSession, Script
from tests.router.smollm2 import smollm2

BODY = {"model": "smollm2", "messages": HI}
CONFIG = RouterConfig(
    classes={"interactive": ClassConfig(queue_time_slo_s=2.0), "batch": ClassConfig(queue_time_slo_s=600.0)},
    tenants={"acme": TenantConfig(api_keys=("key-1", "key-2")), "other": TenantConfig(api_keys=("key-3",))},
    debug_decisions=10,
)


def caller(backend: FakeBackend, config: RouterConfig = CONFIG, key: str = "key-1") -> httpx.AsyncClient:
    app = build_app(backend, smollm2(), config)
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router", headers=headers)


@pytest.mark.parametrize(
    ("headers", "fields", "expected"),
    [
        ({}, {}, "standard"),
        ({"x-request-class": "batch"}, {}, "batch"),
        ({}, {"service_tier": "interactive"}, "interactive"),
        ({}, {"service_tier": "flex"}, "batch"),
        ({}, {"service_tier": None}, "standard"),
        ({"x-request-class": "batch"}, {"service_tier": "interactive"}, "batch"),
    ],
)
async def test_the_class_of_a_request(headers: dict[str, str], fields: dict[str, object], expected: str) -> None:
    backend = FakeBackend()
    async with caller(backend) as client:
        answer = await client.post(CHAT, json={**BODY, **fields}, headers=headers)
    assert answer.status_code == 200
    assert {one.request_class for one in backend.batches[0].requests} == {expected}
    assert backend.batches[0].terms.request_class == expected


@pytest.mark.parametrize(
    ("headers", "fields", "param", "says"),
    [
        ({"x-request-class": "gold"}, {}, None, "X-Request-Class"),
        ({"x-request-class": "g" * 65}, {}, None, "64"),
        ({}, {"service_tier": "gold"}, "service_tier", "interactive"),
        ({}, {"service_tier": 3}, "service_tier", "string"),
        ({"x-queue-time-slo-ms": "-1"}, {}, None, "X-Queue-Time-SLO-Ms must be a number of milliseconds above 0, at most 600000"),
        ({"x-queue-time-slo-ms": "1e99"}, {}, None, "X-Queue-Time-SLO-Ms"),
        ({"x-ttft-slo-ms": "nan"}, {}, None, "X-TTFT-SLO-Ms must be a number of milliseconds above 0, at most 600000"),
        ({"x-ttft-slo-ms": "0"}, {}, None, "X-TTFT-SLO-Ms"),
        ({"x-tpot-slo-ms": "soon"}, {}, None, "X-TPOT-SLO-Ms must be a number of milliseconds above 0, at most 60000"),
        ({"x-tpot-slo-ms": "9" * 400}, {}, None, "X-TPOT-SLO-Ms"),
    ],
)
async def test_what_cannot_be_promised_is_400(headers: dict[str, str], fields: dict[str, object], param: str | None, says: str) -> None:
    backend = FakeBackend()
    async with caller(backend) as client:
        answer = await client.post(CHAT, json={**BODY, **fields}, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert says in error["message"] and "gold" not in error["message"]
    assert not backend.batches


async def test_overrides_reach_admission() -> None:
    backend = FakeBackend()
    headers = {"x-queue-time-slo-ms": "1500", "x-ttft-slo-ms": "2500", "x-tpot-slo-ms": "80"}
    async with caller(backend) as client:
        await client.post(CHAT, json=BODY, headers=headers)
    batch = backend.batches[0]
    assert (batch.queue_time_slo_s, batch.ttft_slo_s, batch.tpot_slo_s) == (1.5, 2.5, 0.08)


async def test_keys_of_one_tenant_share_and_others_do_not() -> None:
    backend = FakeBackend()
    for key in ("key-1", "key-2", "key-3"):
        async with caller(backend, key=key) as client:
            assert (await client.post(CHAT, json=BODY)).status_code == 200
    first, second, third = (batch.requests[0] for batch in backend.batches)
    assert [one.tenant for one in (first, second, third)] == ["acme", "acme", "other"]
    assert first.block_keys == second.block_keys != third.block_keys
    async with caller(backend, key="key-4") as client:
        assert (await client.post(CHAT, json=BODY)).status_code == 401


async def test_decisions_are_shown_where_configured_and_to_those_with_a_key() -> None:
    backend = FakeBackend()
    backend.told = Account(decisions=tuple({"number": number, "tenant": tenant} for number, tenant in enumerate(("acme", "other", "acme"))))
    for key, numbers in (("key-1", [0, 2]), ("key-2", [0, 2]), ("key-3", [1])):
        async with caller(backend, key=key) as client:
            shown = (await client.get("/debug/decisions")).json()["data"]
            assert [one["number"] for one in shown] == numbers, "its own tenant's, nobody else's"
    open_to_all = RouterConfig(debug_decisions=10)
    backend.told = Account(decisions=({"number": 1, "tenant": ""},))
    async with caller(backend, open_to_all) as client:
        assert len((await client.get("/debug/decisions")).json()["data"]) == 1
    async with caller(backend, key="wrong") as client:
        assert (await client.get("/debug/decisions")).status_code == 401
    async with caller(backend, RouterConfig()) as client:
        assert (await client.get("/debug/decisions")).status_code == 404


def test_a_poll_of_the_decisions_is_bounded() -> None:
    """Of 16 candidates each, it is built and sent on the loop."""
    assert RouterConfig(debug_decisions=500).debug_decisions == 500
    with pytest.raises(ValidationError, match="500"):
        RouterConfig(debug_decisions=501)


async def test_predictions_and_promises_are_counted() -> None:
    backend = FakeBackend(lambda request: Script(queue_time_s=2.5))
    backend.told = Account(totals=(Total("predictions", 7.0, (("of", "ttft"), ("length", "<=128"), ("quantile", "0.5"))),))
    async with caller(backend) as client:
        await client.post(CHAT, json=BODY, headers={"x-request-class": "interactive"})
        await client.post(CHAT, json=BODY)
        page = (await client.get("/metrics")).text
    assert 'rantang:predictions_total{length="<=128",model_name="smollm2",of="ttft",quantile="0.5"} 7.0' in page
    assert 'rantang:slo_total{kept="false",model_name="smollm2",of="queue_time",request_class="interactive"} 1.0' in page
    assert 'rantang:slo_total{kept="true",model_name="smollm2",of="queue_time",request_class="standard"} 1.0' in page
    buckets = {line.split('le="')[1].split('"')[0] for line in page.splitlines() if line.startswith("rantang:queue_time_seconds_bucket")}
    assert {"1.8", "1.9", "2.0", "2.1", "2.2", "9.5", "10.5", "600.0"} <= buckets, "fine round every promise"


async def lost(self: FakeSession) -> tuple[Delta]:
    """Some tokens, then the replicas were lost."""
    self.delivered_tokens += 1
    if self.delivered_tokens == 1:
        return (Delta(0, (28120,), predicted=Prediction((0.1,) * 3, (0.2,) * 3, 31, 0)),)
    failure = Failure(503, "replicas_lost", 2.0)
    return (Delta(0, finish=FinishReason.ERROR, error="2 replicas were lost while they served this request", failure=failure),)


async def test_lost_replicas_are_503_where_nothing_was_sent_and_an_event_where_it_was(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeSession, "__anext__", lost)
    answer = await post(client, CHAT)
    assert answer.status_code == 503
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("2", "2000")
    assert answer.json()["error"]["code"] == "replicas_lost"
    events = await stream(client, CHAT)
    assert "replicas_lost" in str(events)
    page = (await client.get("/metrics")).text
    assert 'rantang:requests_total{model_name="smollm2",outcome="failed"} 2.0' in page


async def test_another_failure_stays_500(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda request: Script(finish=FinishReason.ERROR, error="it broke", stop_id=None)
    assert (await post(client, CHAT)).status_code == 500


async def test_a_refusal_waits_for_the_body_only_where_that_names_the_class() -> None:
    asked: list[str] = []

    class Choosy(FakeBackend):
        def foresee(self, arrival_s: float, terms: Terms, about_tokens: int) -> Rejected | None:
            asked.append(terms.request_class)
            return None if terms.request_class == "batch" else Rejected(429, "queue_time", "busy", 1.0)

    backend = Choosy()
    async with caller(backend) as client:
        assert (await client.post(CHAT, json={**BODY, "service_tier": "batch"})).status_code == 200
        assert (await client.post(CHAT, json={**BODY, "service_tier": "interactive"})).status_code == 429
        assert (await client.post(CHAT, content=b"{", headers={"content-type": "application/json"})).status_code == 429
        headers = {"content-type": "application/json", "x-request-class": "interactive"}
        assert (await client.post(CHAT, content=b'{"service_tier"', headers=headers)).status_code == 429
    assert asked == ["batch", "interactive", "standard", "interactive"]
