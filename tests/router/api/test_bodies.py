from __future__ import annotations

import json
import time

import httpx
import pytest

from router.api import errors
from tests.router.api.bodies import SHORT, Body, many_bad_messages
from tests.router.api.wire import CHAT, COMPLETIONS, HI, error_of, post, strict_json
from tests.router.fake_backend import FakeBackend

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("body", SHORT, ids=[f"{i}-{body.case}" for i, body in enumerate(SHORT)])
async def test_every_body_gets_one_of_its_answers(client: httpx.AsyncClient, backend: FakeBackend, body: Body) -> None:
    response = await client.post(body.path, content=body.raw.encode(), headers=JSON)
    assert response.status_code in body.statuses, response.text
    if response.status_code >= 400:
        error = error_of(response)
        assert body.param is None or error["param"] == body.param
        assert body.code is None or error["code"] == body.code
        assert not backend.batches, "a refused body must not reach the backend"
    else:
        usage = strict_json(response.content)["usage"]
        assert body.prompt_tokens is None or usage["prompt_tokens"] == body.prompt_tokens
    assert backend.running == 0
    assert (await post(client, CHAT, max_tokens=4)).status_code == 200  # the next request works


async def test_many_faults_give_a_short_error(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, content=many_bad_messages(), headers=JSON)
    assert response.status_code == 400
    error = error_of(response)
    assert "zzzz" not in response.text and error["message"].count("messages[") == 5 and error["param"] == "messages[0].role"


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("seed", -(2**63), 2**63 - 1),
        ("top_k", -1, 2**63 - 1),
        ("n", 1, 128),
        ("min_tokens", 0, 2**31 - 1),
        ("max_tokens", 1, 2**31 - 1),
    ],
)
async def test_whole_numbers_out_of_range_are_told_the_range_however_large(
    client: httpx.AsyncClient, field: str, least: int, most: int
) -> None:
    """The JSON parser makes a float of 2^64: that it were no integer would be no help."""
    for value in (least - 1, most + 1, 2**63, 2**64, -(2**64), 10**30):
        response = await client.post(CHAT, content=json.dumps({"model": "smollm2", "messages": HI, field: value}), headers=JSON)
        assert response.status_code == 400 and error_of(response)["param"] == field
        assert error_of(response)["message"] == f"{field}: must be a whole number from {least} to {most}"
    for value in ("1.5", '"8"', "true", "1e3"):  # the control: these are no whole numbers
        response = await client.post(
            CHAT, content=f'{{"model": "smollm2", "messages": {json.dumps(HI)}, "{field}": {value}}}', headers=JSON
        )
        assert response.status_code == 400 and "valid integer" in error_of(response)["message"]


async def test_submitted_strings_are_not_echoed(client: httpx.AsyncClient) -> None:
    secret = "do-not-repeat-this"
    for fields in (
        {"temperature": secret},
        {"logit_bias": {secret: 1}},
        {"stop": [secret, 5]},
        {"stream_options": {"include_usage": secret}},
        {"messages": [{"role": secret, "content": "x"}]},
        {"chat_template_kwargs": {"messages": secret}},
        {"response_format": {"type": secret}},
    ):
        response = await post(client, CHAT, **fields)
        assert response.status_code == 400 and secret not in response.text, fields


def test_the_error_limit_is_kept_by_construction() -> None:
    error = errors.ApiError(400, "\x00" * 100_000, "\x00" * 100_000, "c")
    assert len(error.body()) <= errors.ERROR_BODY_BYTES_MAX


async def test_deep_json_is_refused_quickly(client: httpx.AsyncClient) -> None:
    raw = b'{"model":"smollm2","messages":[],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    started = time.perf_counter()
    response = await client.post(CHAT, content=raw, headers=JSON)
    assert response.status_code == 400 and time.perf_counter() - started < 5  # generous: about a millisecond
    with pytest.raises(RecursionError):  # the control: the standard library's parser
        json.loads(raw)


async def test_the_limit_of_depth_is_exact(client: httpx.AsyncClient) -> None:
    for depth, status in ((63, 200), (64, 400)):  # the root is one more
        response = await post(client, CHAT, x=json.loads("[" * depth + "]" * depth))
        assert response.status_code == status
        assert status == 200 or error_of(response)["param"] == "x"


async def test_2000_messages_are_counted_for_real(client: httpx.AsyncClient) -> None:
    response = await post(client, CHAT, messages=HI * 2000)
    error = error_of(response)
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    assert "8192" in error["message"] and str(21 + 2000 * 6 + 4) in error["message"]  # both numbers, exact


async def test_a_long_text_is_refused_before_it_is_encoded(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    from router.text.tokenizer import Tokenizer

    def never(*args: object, **options: object) -> None:
        raise AssertionError("the cheap bound should have refused this")

    monkeypatch.setattr(Tokenizer, "encode", never)
    long = "word " * 800_000
    for path, fields in ((COMPLETIONS, {"prompt": long}), (CHAT, {"messages": [{"role": "user", "content": long}]})):
        response = await post(client, path, **fields)
        assert response.status_code == 400 and error_of(response)["code"] == "context_length_exceeded"
    monkeypatch.setattr(Tokenizer, "tokens_at_least", lambda self, text, enough: 0)
    assert (await post(client, COMPLETIONS, prompt=long)).status_code == 500  # the control: without the bound it encodes


async def test_large_tools_are_refused_by_name(client: httpx.AsyncClient) -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}", "description": "d" * 2900}} for i in range(64)]
    response = await post(client, CHAT, tools=tools)
    assert response.status_code == 400 and error_of(response)["param"] == "tools"
