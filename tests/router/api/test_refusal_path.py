"""A refusal that is foreseen costs no text work; a short text costs no thread."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from msgspec import structs

from router.api import endpoints
from router.api.limits import IDS_INLINE_BYTES_MAX, TEXT_INLINE_BYTES_MAX
from router.api.text_pool import TextPool
from router.ports import Rejected
from tests.router.fake_backend import FakeBackend

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}]}


async def test_a_foreseen_refusal_reads_no_text(client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    prompt = endpoints.chat_prompt

    def reading(*arguments: Any) -> Any:
        read.append(arguments)
        return prompt(*arguments)

    monkeypatch.setattr(endpoints, "chat_prompt", reading)
    backend.foreseen = Rejected(429, "queue_time", "the predicted queue time of 9.0 s exceeds 2 s", 7.2)
    answer = await client.post(CHAT, json=BODY)
    assert answer.status_code == 429
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("8", "7200")
    assert answer.json()["error"]["code"] == "queue_time"
    assert not read and not backend.batches
    page = (await client.get("/metrics")).text
    assert 'rantang:requests_shed_total{model_name="smollm2",reason="queue_time",status="429"} 1.0' in page
    assert 'rantang:requests_accepted_total{model_name="smollm2"} 1.0' in page
    backend.foreseen = None
    assert (await client.post(CHAT, json=BODY)).status_code == 200
    assert len(read) == 1, "the control: otherwise it is read"


async def test_load_is_shed_before_the_body_is_looked_at(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """What a refusal costs does not grow with what was asked: who sends a wrong body hears of it when there is time to read it."""
    wrong = {**BODY, "temperature": "hot"}
    backend.foreseen = Rejected(429, "queue_time", "busy", 1.0)
    assert (await client.post(CHAT, json=wrong)).status_code == 429
    assert (await client.post(CHAT, content=b"{", headers={"content-type": "application/json"})).status_code == 429
    assert (await client.post(CHAT, json=BODY, headers={"x-queue-time-slo-ms": "soon"})).status_code == 400, "the promise itself is read"
    backend.foreseen = None
    assert (await client.post(CHAT, json=wrong)).status_code == 400


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each request that came so far: whether its text work was handed to a thread."""
    seen: list[bool] = []
    run = TextPool.run

    async def watched(self: TextPool, job: Any, *, is_short: bool = False) -> Any:
        seen.append(not is_short)
        return await run(self, job, is_short=is_short)

    monkeypatch.setattr(TextPool, "run", watched)
    return seen


async def test_short_texts_need_no_thread_and_long_ones_do(client: httpx.AsyncClient, handed: list[bool]) -> None:
    long = {**BODY, "messages": [{"role": "user", "content": "x" * TEXT_INLINE_BYTES_MAX}]}
    many = {**BODY, "bad_words": [f"w{i}" for i in range(256)]}
    for body in (BODY, long, many):
        assert (await client.post(CHAT, json=body)).status_code == 200
    assert handed == [False, True, True]


async def test_ids_need_no_thread_unless_they_are_very_many(client: httpx.AsyncClient, backend: FakeBackend, handed: list[bool]) -> None:
    """They are hashed only; a text beside them is none of the prompt's."""
    assert backend.pool.limits is not None
    backend.pool = replace(backend.pool, limits=structs.replace(backend.pool.limits, max_model_len=2**20))
    ids, text = [28120] * 4000, "x " * TEXT_INLINE_BYTES_MAX
    prompts: list[Any] = [ids, [ids, ids[1:]], ids * (IDS_INLINE_BYTES_MAX // 20_000), text, ["x", text]]
    for prompt in prompts:
        assert (await client.post(COMPLETIONS, json={"model": "smollm2", "prompt": prompt})).status_code == 200
    chat = {**BODY, "prompt": ids, "messages": [{"role": "user", "content": text}]}
    assert (await client.post(CHAT, json=chat)).status_code == 200
    assert handed == [False, False, True, True, True, True]
