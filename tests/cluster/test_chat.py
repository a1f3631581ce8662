"""`rantang chat` against servers of every kind, good and bad."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from cluster.chat import HISTORY_MAX, ChatError, Conversation, Options, base_url


def event(content: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': content}}]})}\n\n"


def conversation(handler: Callable[[httpx.Request], httpx.Response], **options: object) -> Conversation:
    client = httpx.Client(base_url="http://server/v1/", transport=httpx.MockTransport(handler))
    return Conversation(client, Options(url="http://server", **options), "m")  # type: ignore[arg-type]


def answering(text: str, seen: list[dict[str, object]] | None = None) -> Callable[[httpx.Request], httpx.Response]:
    def handler(request: httpx.Request) -> httpx.Response:
        if seen is not None:
            seen.append(json.loads(request.content))
        return httpx.Response(200, text=text)

    return handler


@pytest.mark.parametrize("url", ["http://h:1", "h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_url_may_be_written_in_every_way(url: str) -> None:
    assert base_url(url) == "http://h:1/v1/"


def test_it_streams_and_remembers() -> None:
    seen: list[dict[str, object]] = []
    talk = conversation(
        answering(event("Hel") + ": comment\n\n" + event("lo") + "data: [DONE]\n\n", seen), system="Be kind.", temperature=0.0
    )
    assert list(talk.ask("Hi")) == ["Hel", "lo"]
    list(talk.ask("And?"))
    assert seen[1]["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And?"},
    ]
    assert (seen[0]["stream"], seen[0]["temperature"], seen[0]["model"]) == (True, 0.0, "m")
    talk.clear()
    assert talk.messages == [{"role": "system", "content": "Be kind."}]


def test_an_answer_stopped_midway_stays_in_the_history() -> None:
    talk = conversation(answering(event("one ") + event("two ") + event("three") + "data: [DONE]\n\n"))
    pieces = talk.ask("Count")
    assert next(iter(pieces)) == "one "
    pieces.close()  # type: ignore[attr-defined]
    assert talk.messages[-1] == {"role": "assistant", "content": "one "}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (
            httpx.Response(429, json={"error": {"message": "too busy"}}, headers={"retry-after": "3"}),
            "status 429: too busy (try again in 3 s)",
        ),
        (httpx.Response(500, text="<html>"), "status 500: Internal Server Error"),
        (httpx.Response(200, text=event("a") + 'data: {"error": {"message": "replica lost"}}\n\n'), "replica lost"),
        (httpx.Response(200, text=event("a")), "the server ended the stream before the answer was complete"),
        (httpx.Response(200, text="data: {oops\n\n"), "not JSON"),
    ],
)
def test_a_failure_is_said_in_one_line(response: httpx.Response, expected: str) -> None:
    talk = conversation(lambda _: response)
    with pytest.raises(ChatError) as caught:
        list(talk.ask("Hi"))
    assert expected in str(caught.value)


def test_a_question_without_an_answer_is_forgotten() -> None:
    talk = conversation(lambda _: httpx.Response(503))
    with pytest.raises(ChatError):
        list(talk.ask("Hi"))
    assert talk.messages == []


def test_the_history_is_bounded() -> None:
    talk = conversation(answering(event("x") + "data: [DONE]\n\n"), system="s")
    for number in range(HISTORY_MAX):
        list(talk.ask(str(number)))
    assert len(talk.messages) == HISTORY_MAX + 1
    assert talk.messages[0]["role"] == "system"
