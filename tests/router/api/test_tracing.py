from __future__ import annotations

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from router.app import build_app
from router.config import RouterConfig
from router.ports import Rejected
from tests.router.api.wire import CHAT, HI, post
from tests.router.fake_backend import EOS, FakeBackend, Script
from tests.router.smollm2 import smollm2

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
BODY = {"model": "smollm2", "messages": HI}


@pytest.fixture
def traced() -> tuple[FakeBackend, httpx.AsyncClient, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    backend = FakeBackend(lambda request: Script(tokens=(28120, EOS), cached_tokens=16))
    app = build_app(backend, smollm2(), RouterConfig(), tracer=provider.get_tracer("test"))
    return backend, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router"), exporter


async def test_one_span_a_request_under_the_clients(traced: tuple[FakeBackend, httpx.AsyncClient, InMemorySpanExporter]) -> None:
    backend, client, exporter = traced
    await client.post(CHAT, json=BODY, headers=HEADERS)
    (span,) = exporter.get_finished_spans()
    assert span.context is not None and span.parent is not None and span.attributes is not None
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    assert backend.batches[0].requests[0].traceparent == f"00-{TRACE}-{span.context.span_id:016x}-01"  # the replica's parent is ours
    attributes = dict(span.attributes)
    assert attributes["gen_ai.request.model"] == "smollm2" and attributes["http.response.status_code"] == 200
    assert attributes["gen_ai.usage.input_tokens"] == 31 and attributes["gen_ai.usage.output_tokens"] == 2
    assert attributes["rantang.cached_tokens"] == 16 and attributes["rantang.queue_time_s"] == 0.01
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",) and attributes["rantang.outcome"] == "finished"
    assert isinstance(attributes["gen_ai.latency.time_to_first_token"], float)


async def test_refusals_and_failures_have_spans_too(traced: tuple[FakeBackend, httpx.AsyncClient, InMemorySpanExporter]) -> None:
    backend, client, exporter = traced
    await post(client, CHAT, temperature=9)
    backend.reject = Rejected(429, "queue_time", "busy", 1.0)
    await post(client, CHAT)
    backend.reject, backend.script = None, lambda request: Script(raise_after=0)
    await post(client, CHAT)
    spans = exporter.get_finished_spans()
    seen = [((span.attributes or {})["http.response.status_code"], (span.attributes or {})["rantang.outcome"]) for span in spans]
    assert seen == [(400, "invalid"), (429, "shed"), (500, "failed")]
    assert [span.status.is_ok for span in spans] == [True, True, False]


async def test_without_a_tracer_the_clients_parent_is_passed_on(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await client.post(CHAT, json=BODY, headers=HEADERS)
    assert backend.batches[-1].requests[0].traceparent == HEADERS["traceparent"]
    for headers in ({}, {"traceparent": "nonsense"}, {"traceparent": f"00-{'0' * 32}-{PARENT}-01"}):
        await client.post(CHAT, json=BODY, headers=headers)
        assert backend.batches[-1].requests[0].traceparent == ""
