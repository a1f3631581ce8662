"""The short way of tokens that are text as they are says, byte for byte, what the long way says."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from msgspec import structs

from replica.contract.messages import FinishReason
from router.api.choice import Choice
from router.api.chunks import Chunks
from router.api.plain_events import PlainEvents
from router.app import build_app
from router.config import RouterConfig
from router.policy.prediction import Prediction
from router.ports import Delta
from router.text.json_texts import JsonTexts
from tests.router.api.wire import CHAT, COMPLETIONS, HI, RawCall
from tests.router.fake_backend import FakeBackend, Script, token_logprobs
from tests.router.smollm2 import smollm2

SHOWN: list[dict[str, Any]] = [
    {},
    {"return_token_ids": True},
    {"return_token_ids": True, "skip_special_tokens": False},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"n": 3, "return_token_ids": True},
    {"stop": ["zq", "never said"]},
    {"logprobs": True},
]
FACES = 'a 😀 ü\u202e\\ "quoted"\n日本 ' * 4


def drawn(seed: int) -> Script:
    """Words, halves of characters, specials and what JSON escapes; some tokens alone, some two in a step, some steps read together."""
    draw = random.Random(f"plain/{seed}")
    faces = smollm2().tokenizer.encode(FACES, parse_special=False)
    tokens = [draw.choice((draw.randrange(49_152), draw.randrange(300), faces[i % len(faces)])) for i in range(draw.randint(1, 80))]
    tokens[draw.randrange(len(tokens)) :] += faces
    return Script(
        tokens=tuple(tokens),
        per_delta=draw.choice((1, 1, 1, 2)),
        finish=draw.choice((FinishReason.LENGTH, FinishReason.ERROR)),
        stop_id=None,
        together=draw.randint(1, 30),
        finish_alone=draw.random() < 0.3,
        raise_after=40 if seed == 3 else None,
    )


async def answered(path: str, seed: int, fields: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """The stream, without what no two have in common, and the counts of the metrics."""
    backend = FakeBackend(script=lambda request: drawn(seed + request.choice))
    app = build_app(backend, smollm2(), RouterConfig())
    prompt = {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    if path == COMPLETIONS and "logprobs" in fields:
        fields = {"logprobs": 2}
    one = RawCall(json.dumps({"model": "smollm2", "stream": True, "max_tokens": 200} | prompt | fields).encode(), path=path)
    await one.run(app)
    page = RawCall(b"", path="/metrics", method="GET")
    await page.run(app)
    counts = dict(line.rsplit(" ", 1) for line in page.text.splitlines() if "_count" in line or "_total" in line)
    return re.sub(r'"id":"[^"]*","object":"([^"]*)","created":\d+', r'"\1"', one.text), counts


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", SHOWN, ids=str)
async def test_both_ways_say_the_same(path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    short = [await answered(path, seed, fields) for seed in range(8)]
    with monkeypatch.context() as long_way:
        long_way.setattr(Chunks, "plain", lambda *_, **__: None)
        assert [await answered(path, seed, fields) for seed in range(8)] == short


@pytest.mark.parametrize("fields", [{}, {"stop": ["e"]}], ids=str)
async def test_without_its_guard_they_would_not(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of characters, and texts that may become a stop string, are not what they are alone."""
    await test_both_ways_say_the_same(CHAT, fields, monkeypatch)
    monkeypatch.setattr(Choice, "texts", property(lambda self: smollm2().tokenizer.json_texts(skip_special=True)))
    with pytest.raises(AssertionError):
        await test_both_ways_say_the_same(CHAT, fields, monkeypatch)


@pytest.mark.parametrize("is_off", [False, True])
async def test_most_tokens_go_it(monkeypatch: pytest.MonkeyPatch, is_off: bool) -> None:
    pushed: list[Delta] = []
    push = Choice.push

    def counted(self: Choice, delta: Delta) -> Any:
        pushed.append(delta)
        return push(self, delta)

    monkeypatch.setattr(Choice, "push", counted)
    if is_off:
        monkeypatch.setattr(Chunks, "plain", lambda *_, **__: None)
    backend = FakeBackend(script=lambda request: Script(tokens=(28120,) * 50, finish=FinishReason.LENGTH, stop_id=None))
    one = RawCall(json.dumps({"model": "smollm2", "stream": True, "messages": HI}).encode())
    await one.run(build_app(backend, smollm2(), RouterConfig()))
    assert one.text.count('"content":"hello"') == 50
    assert len(pushed) == (50 if is_off else 2), "the first, with the role, and the last"


PLAIN = Delta(1, (28120,))


@pytest.mark.parametrize(
    "other",
    [
        structs.replace(PLAIN, index=0),
        structs.replace(PLAIN, token_ids=(28120, 28120)),
        structs.replace(PLAIN, token_ids=()),
        structs.replace(PLAIN, token_ids=(2,)),  # special: it is not shown
        structs.replace(PLAIN, finish=FinishReason.STOP),
        structs.replace(PLAIN, logprobs=(token_logprobs(28120, 1),)),
        structs.replace(PLAIN, queue_time_s=0.0),
        structs.replace(PLAIN, cached_tokens=0),
        structs.replace(PLAIN, predicted=Prediction((), (), 0, 0)),
    ],
    ids=str,
)
def test_whatever_is_more_than_a_token_goes_the_long_way(other: Delta) -> None:
    texts = JsonTexts(smollm2().tokenizer.table(skip_special=True))
    events = PlainEvents(1, b"<", b">", False, b"")
    assert events.of([PLAIN, PLAIN, PLAIN], 1, texts) == [b'<"hello">'] * 2
    assert events.of([PLAIN, PLAIN, other, PLAIN], 0, texts) == [b'<"hello">'] * 2
    assert events.of([other, PLAIN], 0, texts) == []
