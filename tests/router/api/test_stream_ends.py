"""A stream always ends explicitly, and everything a request held is let go, however it ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from replica.contract.messages import FinishReason
from router.api import limits, outbox
from router.api.chat_answer import ChatAnswer
from router.api.plain_events import PlainEvents
from router.app import build_app
from router.config import RouterConfig
from router.ports import Rejected
from router.text.detokenizer import Detokenizer
from router.text.json_texts import JsonTexts
from tests.router.api.wire import CHAT, COMPLETIONS, HI, RawCall, choices_of, error_of, events_of, post, stream, until
from tests.router.fake_backend import EOS, FakeBackend, Script, repeat
from tests.router.smollm2 import smollm2


def call(**fields: Any) -> RawCall:
    return RawCall(json.dumps({"model": "smollm2", "messages": HI, "stream": True} | fields).encode())


async def test_what_came_together_leaves_together_and_stays_apart(backend: FakeBackend) -> None:
    """One message for the server, an event for each Delta."""
    app = build_app(backend, smollm2(), RouterConfig())
    backend.script = lambda request: Script(tokens=(28120,) * 12, finish=FinishReason.LENGTH, stop_id=None, together=4)
    one = call(max_tokens=12)
    await one.run(app)
    assert [message["body"].count(b"data: ") for message in one.sent[1:]] == [1 + 4, 4, 4 + 1 + 1]  # role, tokens, finish, [DONE]
    assert one.complete and choices_of(events_of(one.text))[0].texts == ["hello"] * 12


@pytest.mark.parametrize("together", [1, 3, 8])
async def test_tokens_before_a_failure_that_came_with_them_are_shown(
    backend: FakeBackend, client: httpx.AsyncClient, together: int
) -> None:
    failing = Script(tokens=(28120,) * 4, finish=FinishReason.ERROR, stop_id=None, error="why", finish_alone=True, together=together)
    backend.script = lambda request: failing
    events = await stream(client, CHAT)
    assert choices_of(events)[0].texts == ["hello"] * 4 and "error" in events[-1]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_error_inside_a_stream(client: httpx.AsyncClient, backend: FakeBackend, path: str) -> None:
    """One error event ends every choice still open, then [DONE]."""
    for script in (
        Script(tokens=(28120,) * 6, finish=FinishReason.ERROR, stop_id=None, error="logits are not finite"),
        Script(tokens=(28120,) * 6, finish=FinishReason.ABORT, stop_id=None),
        Script(tokens=(28120,) * 6, raise_after=5),
    ):
        backend.script = lambda request, script=script: script
        events = await stream(client, path, n=2)
        errors = [event for event in events if "error" in event]
        assert len(errors) == 1 and events[-1] is errors[0]
        assert choices_of(events)[0].text.startswith("hello" * 4)
        assert backend.sessions[-1].closed


async def test_a_choice_that_finished_before_keeps_its_finish(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    broken = Script(tokens=(28120,) * 6, raise_after=4)
    backend.script = lambda request: broken if request.choice else repeat(28120, 2)
    events = await stream(client, CHAT, n=2)
    assert choices_of(events)[0].finishes == ["length"] and choices_of(events)[1].finishes == []
    assert "error" in events[-1]


async def test_errors_before_the_first_byte_have_their_own_status(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    for finish, status in ((FinishReason.ERROR, 500), (FinishReason.TIMEOUT, 429), (FinishReason.ABORT, 503)):
        backend.script = lambda request, finish=finish: Script(tokens=(), finish=finish, stop_id=None, error="why")
        for streaming in (True, False):
            response = await post(client, CHAT, stream=streaming)
            assert response.status_code == status
            error_of(response)
            assert ("retry-after" in response.headers) == (status != 500)
    backend.script = lambda request: Script(raise_after=0)
    assert (await post(client, CHAT, stream=True)).status_code == 500


async def test_a_session_that_ends_early_is_an_error(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda request: Script(tokens=(28120,) * 4, delay_s=0.001)

    def cut_short(index: int) -> None:
        backend.sessions[-1]._turn.clear()

    task = asyncio.create_task(post(client, CHAT, stream=True))
    await until(lambda: backend.sessions and backend.sessions[-1].delivered_tokens >= 1)
    cut_short(0)
    response = await task
    assert "error" in events_of(response.text)[-1]


@pytest.mark.parametrize("plain", [True, False])
async def test_a_fault_in_turning_tokens_into_text(
    client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    """It ends that request alone: others of the time finish as usual."""
    original = Detokenizer.push
    plain_events = PlainEvents.of

    def faulty(self: Detokenizer, ids: Any) -> str:
        if 666 in ids:
            raise RuntimeError("a bug")
        return original(self, ids)

    def faulty_events(self: PlainEvents, deltas: Any, start: int, texts: JsonTexts) -> list[bytes]:
        if any(666 in delta.token_ids for delta in deltas):
            raise RuntimeError("a bug")
        return plain_events(self, deltas, start, texts)

    monkeypatch.setattr(Detokenizer, "push", faulty)
    monkeypatch.setattr(PlainEvents, "of", faulty_events if plain else lambda *_: [])
    backend.script = lambda request: Script(tokens=(28120, 666 if request.sampling.max_tokens == 7 else 28120, EOS))
    bad, *good = await asyncio.gather(stream(client, CHAT, max_tokens=7), *(stream(client, CHAT, max_tokens=8) for _ in range(4)))
    assert "error" in bad[-1]
    assert all(choices_of(events)[0].finishes == ["stop"] for events in good)


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_fault_in_the_answer_is_ours(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    """500, counted as failed: nobody aborted it."""

    def faulty(*_: object) -> bytes:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ChatAnswer, "whole", faulty)
    monkeypatch.setattr(ChatAnswer, "opening", faulty)
    response = await post(client, CHAT, stream=streaming)
    assert response.status_code == 500 and error_of(response)["code"] == "internal_error"
    metrics = (await client.get("/metrics")).text
    assert 'rantang:requests_total{model_name="smollm2",outcome="failed"} 1.0' in metrics


@pytest.mark.parametrize(
    ("rejected", "status", "after", "milliseconds"),
    [
        (Rejected(429, "queue_time", "too busy", 2.3), 429, "3", "2300"),
        (Rejected(429, "queue_full", "full", 0.02), 429, "1", "20"),
        (Rejected(429, "queue_full", "full"), 429, "1", "1000"),
        (Rejected(503, "no_replica", "nobody", None), 503, "1", "1000"),
        (Rejected(503, "no_replica", "nobody", float("inf")), 503, "1", "1000"),
        (Rejected(400, "never_fits", "9000 tokens, 8192 fit"), 400, None, None),
    ],
)
@pytest.mark.parametrize("streaming", [True, False])
async def test_refusals(
    client: httpx.AsyncClient, backend: FakeBackend, rejected: Rejected, status: int, after: str, milliseconds: str, streaming: bool
) -> None:
    backend.reject = rejected
    response = await post(client, CHAT, stream=streaming)
    assert response.status_code == status
    assert response.headers.get("retry-after") == after and response.headers.get("retry-after-ms") == milliseconds
    error = error_of(response)
    assert error["code"] == rejected.reason and error["message"] == rejected.message


async def test_headers_wait_for_the_first_token(backend: FakeBackend) -> None:
    """So that a request that waited in vain still gets its 429."""
    app = build_app(backend, smollm2(), RouterConfig())
    backend.hold = asyncio.Event()
    waiting = call()
    task = asyncio.create_task(waiting.run(app))
    await until(lambda: backend.opening == 1)
    assert not waiting.sent
    backend.reject = Rejected(429, "queue_time_waited", "hopeless", 1.0)
    backend.hold.set()
    await task
    assert waiting.status == 429 and waiting.complete and not waiting.text.startswith("data:")

    backend.reject = None
    backend.script = lambda request: Script(tokens=(28120, EOS), delay_s=0.2)
    placed = call()
    task = asyncio.create_task(placed.run(app))
    await until(lambda: len(backend.sessions) == 1)
    await asyncio.sleep(0.02)
    assert not placed.sent  # placed at a replica, but no token yet
    await task
    assert placed.status == 200 and placed.complete


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_frees_its_request_at_once(backend: FakeBackend, streaming: bool) -> None:
    app = build_app(backend, smollm2(), RouterConfig())
    backend.script = lambda request: Script(tokens=(28120,) * 10_000, delay_s=0.001)
    leaving, staying = call(stream=streaming), call(max_tokens=40)
    tasks = [asyncio.create_task(one.run(app)) for one in (leaving, staying)]
    await until(lambda: len(backend.sessions) == 2 and backend.sessions[0].delivered_tokens > 3)
    leaving.gone.set()
    await until(lambda: tasks[0].done())
    assert tasks[0].exception() is None and not leaving.complete
    closed = [session.closed for session in backend.sessions]
    assert closed.count(True) == 1
    await tasks[1]
    assert choices_of(events_of(staying.text))[0].finishes == ["length"]


async def test_a_client_that_leaves_while_it_waits(backend: FakeBackend) -> None:
    app = build_app(backend, smollm2(), RouterConfig())
    backend.hold = asyncio.Event()
    leaving = call()
    task = asyncio.create_task(leaving.run(app))
    await until(lambda: backend.opening == 1)
    leaving.gone.set()
    await until(lambda: task.done())
    assert backend.cancelled_opens == 1 and not leaving.sent and task.exception() is None


async def test_a_cancellation_from_outside_goes_through(backend: FakeBackend) -> None:
    app = build_app(backend, smollm2(), RouterConfig())
    backend.script = lambda request: Script(tokens=(28120,) * 10_000, delay_s=0.001)
    task = asyncio.create_task(call().run(app))
    await until(lambda: backend.sessions and backend.sessions[0].delivered_tokens > 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.sessions[0].closed


async def test_a_send_that_fails_frees_the_request(backend: FakeBackend) -> None:
    app = build_app(backend, smollm2(), RouterConfig())
    backend.script = lambda request: Script(tokens=(28120,) * 10_000, delay_s=0.001)

    def fail_after_three(message: Any) -> None:
        if len(broken.sent) >= 3:
            raise OSError("connection lost")

    broken = call()
    broken.on_send = fail_after_three
    await asyncio.wait_for(broken.run(app), 10)
    assert backend.sessions[0].closed and backend.sessions[0].delivered_tokens < 1000


async def test_a_client_that_does_not_read_is_cut(backend: FakeBackend) -> None:
    """Its unsent bytes stay bounded, its request ends, and others go on meanwhile."""
    app = build_app(backend, smollm2(), RouterConfig())
    backend.script = lambda request: Script(
        tokens=(28120,) * 100_000 if request.sampling.max_tokens == 8000 else (28120,) * 50, stop_id=None
    )
    stuck, reading = call(max_tokens=8000), call(max_tokens=50)

    def stop_reading(message: Any) -> None:
        stuck.reading.clear()  # after the headers

    stuck.on_send = stop_reading
    tasks = [asyncio.create_task(one.run(app)) for one in (stuck, reading)]
    await until(lambda: tasks[0].done())
    await tasks[1]
    assert reading.complete and not stuck.complete
    session = next(session for session in backend.sessions if session.delivered_tokens > 50)
    assert session.closed
    bytes_per_token = len(reading.text) / 50
    assert session.delivered_tokens * bytes_per_token < 1.5 * limits.UNSENT_BYTES_MAX


async def test_without_the_bound_it_would_not_be(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "UNSENT_BYTES_MAX", 10**9)
    monkeypatch.setattr(outbox, "FLUSH_SECONDS_MAX", 0.05)
    app = build_app(backend, smollm2(), RouterConfig())
    backend.script = lambda request: Script(tokens=(28120,) * 8000, stop_id=None)
    stuck = call(max_tokens=8000)
    stuck.on_send = lambda message: stuck.reading.clear()
    task = asyncio.create_task(stuck.run(app))
    await until(lambda: backend.sessions and backend.sessions[0].delivered_tokens == 8000)
    stuck.gone.set()
    await task


async def test_a_finished_answer_does_not_wait_for_ever(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "FLUSH_SECONDS_MAX", 0.05)
    app = build_app(backend, smollm2(), RouterConfig())
    stuck = call()
    stuck.on_send = lambda message: stuck.reading.clear()
    await asyncio.wait_for(stuck.run(app), 10)
    assert not stuck.complete and backend.sessions[0].closed


async def test_one_large_event_is_no_slow_client(backend: FakeBackend) -> None:
    """A long echoed prompt with its logprobs is one event above the bound: a client that reads gets it whole."""
    app = build_app(backend, smollm2(), RouterConfig())
    fields = {"model": "smollm2", "prompt": [28120] * 4000, "echo": True, "logprobs": 5, "max_tokens": 3, "stream": True}
    one = RawCall(json.dumps(fields).encode(), path=COMPLETIONS)
    await one.run(app)
    assert one.complete and len(one.text) > limits.UNSENT_BYTES_MAX
    assert one.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("streaming", [True, False])
async def test_the_disconnect_that_ends_every_answer_is_no_abort(backend: FakeBackend, streaming: bool) -> None:
    """Servers report a disconnect as soon as the last byte is handed over, maybe before they return."""
    app = build_app(backend, smollm2(), RouterConfig())
    one = call(stream=streaming)

    def over(message: Any) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            one.gone.set()

    one.on_send, one.lingering = over, True
    await one.run(app)
    assert one.complete
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://router") as client:
        metrics = (await client.get("/metrics")).text
    assert 'rantang:requests_total{model_name="smollm2",outcome="finished"} 1.0' in metrics
