from __future__ import annotations

from typing import Any

import httpx
import pytest

from replica.contract.blocks import block_keys, root_key
from replica.contract.messages import FinishReason, GenerateRequest
from tests.router.api.wire import CHAT, COMPLETIONS, HI, choices_of, ids, post, stream, strict_json
from tests.router.fake_backend import EOS, FakeBackend, Script, repeat
from tests.router.smollm2 import smollm2
from tests.router.text.smollm2_vectors import FAMILY

FOX = (504, 2365, 6354, 16438, 27003, 690, 260)


def plain(response: httpx.Response, path: str) -> list[str]:
    choices = strict_json(response.content)["choices"]
    return [choice["message"]["content"] if path == CHAT else choice["text"] for choice in choices]


async def test_a_chat_answer(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda request: Script(tokens=(28120, EOS), cached_tokens=16)
    body = strict_json((await post(client, CHAT)).content)
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion" and body["model"] == "smollm2"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    assert body["usage"] == {
        "prompt_tokens": 31,
        "completion_tokens": 2,
        "total_tokens": 33,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert backend.sessions[0].closed


async def test_the_order_of_a_stream(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """Role once, text, one finish chunk, usage, [DONE]."""
    events = await stream(client, CHAT, stream_options={"include_usage": True})
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "hello"}, {}]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, "stop"]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 2
    assert all(event["usage"] is None for event in events[:-1])
    assert len({event["id"] for event in events}) == 1


async def test_no_usage_unless_asked_for(client: httpx.AsyncClient) -> None:
    assert all("usage" not in event for event in await stream(client, CHAT))
    running = await stream(client, CHAT, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [event["usage"]["completion_tokens"] for event in running] == [1, 1, 2, 2]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("per_delta", [1, 3])
@pytest.mark.parametrize(
    ("tokens", "stop", "text", "counted"),
    [
        (FOX, ["own fox"], "The quick br", 4),
        ((49, 198, 11126, 42, 260), ["\nUser:"], "A", 4),
        ((49, 33203, 23960, 57, 58, 260), ["DEFGHIJ"], "A", 5),
        ((28120, *ids(FAMILY), 260), ["👦"], "hello" + FAMILY[:-1], 19),
    ],
)
async def test_stop_strings_across_tokens(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    path: str,
    per_delta: int,
    tokens: tuple[int, ...],
    stop: list[str],
    text: str,
    counted: int,
) -> None:
    backend.script = lambda request: Script(tokens=(*tokens, *(260,) * 50), per_delta=per_delta)
    response = await post(client, path, stop=stop, max_tokens=60)
    body = strict_json(response.content)
    assert plain(response, path) == [text]
    assert body["choices"][0]["finish_reason"] == "stop" and body["choices"][0]["stop_reason"] == stop[0]
    assert body["usage"]["completion_tokens"] == counted
    session = backend.sessions[0]
    assert session.stopped == [0] and session.delivered_tokens <= counted + per_delta  # cancelled at once

    streamed = choices_of(await stream(client, path, stop=stop, max_tokens=60))[0]
    assert streamed.text == text and streamed.finishes == ["stop"]
    included = await post(client, path, stop=stop, max_tokens=60, include_stop_str_in_output=True)
    assert plain(included, path) == [text + stop[0]]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_held_end_comes_before_the_finish(client: httpx.AsyncClient, backend: FakeBackend, path: str) -> None:
    question = ids("Really?")
    for script, stop in (
        (Script(tokens=(*question, EOS)), "?!"),
        (Script(tokens=(28120, 198), finish=FinishReason.LENGTH, stop_id=None), "\n\n###"),
        (Script(tokens=(28120, 10813, 242), finish=FinishReason.LENGTH, stop_id=None), "x"),
        (Script(tokens=(28120, 10813), finish=FinishReason.LENGTH, stop_id=None, finish_alone=True), "x"),
    ):
        backend.script = lambda request, script=script: script
        whole = plain(await post(client, path, stop=stop), path)[0]
        events = await stream(client, path, stop=stop)
        assert choices_of(events)[0].text == whole
        assert whole[-1] in "?\n\ufffd"
        last = events[-1]["choices"][0]
        assert last["finish_reason"] and not last.get("text") and not last.get("delta")


@pytest.mark.parametrize("per_delta", [1, 3])
async def test_characters_are_never_split(client: httpx.AsyncClient, backend: FakeBackend, per_delta: int) -> None:
    text = f"A 世界 😀 {FAMILY} 삼겹살 日本語!"
    backend.script = lambda request: Script(tokens=(*ids(text), EOS), per_delta=per_delta)
    streamed = choices_of(await stream(client, CHAT, max_tokens=100))[0]
    assert streamed.text == text and not any("\ufffd" in piece for piece in streamed.texts)
    assert plain(await post(client, CHAT, max_tokens=100), CHAT) == [text]


async def test_n_choices_stream_as_they_read_whole(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    def script(request: GenerateRequest) -> Script:
        return Script(tokens=(*(28120 + request.choice,) * (3 + 5 * request.choice), *ids(" STOP here")), stop_id=None, per_delta=2)

    backend.script = script
    fields: dict[str, Any] = {"n": 4, "temperature": 1, "seed": 7, "max_tokens": 24, "stop": "STOP"}
    whole = await post(client, CHAT, **fields)
    events = await stream(client, CHAT, stream_options={"include_usage": True}, **fields)
    streamed = choices_of(events)
    assert sorted(streamed) == [0, 1, 2, 3]
    assert [streamed[i].text for i in range(4)] == plain(whole, CHAT)
    assert all(len(choice.finishes) == 1 and choice.roles == 1 for choice in streamed.values())
    assert events[-1]["usage"] == strict_json(whole.content)["usage"]
    assert events[-1]["usage"]["prompt_tokens"] == 31  # once, whatever n


async def test_requests_are_filled_completely(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    prompt = "word " * 40
    fields = {
        "n": 2,
        "seed": -1,
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 10**9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "min_tokens": 3,
        "ignore_eos": True,
        "stop_token_ids": [260],
        "logit_bias": {"5": -100},
        "allowed_token_ids": [1, 2, 1, 260, 2],  # each once is enough
        "bad_words": ["fox"],
        "priority": 3,
        "cache_salt": "mine",
    }
    response = await post(client, COMPLETIONS, prompt=prompt, **fields)
    batch = backend.batches[0]
    first, second = batch.requests
    assert (first.choice, second.choice) == (0, 1) and first.sampling == second.sampling
    assert batch.request_id == first.request_id == strict_json(response.content)["id"]
    sampling = first.sampling
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens, sampling.top_k) == (2**63 - 1, 7, 3, 0)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.9, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, -0.5, 0.25)
    assert sampling.ignore_eos and sampling.stop_token_ids == (260,) and sampling.allowed_token_ids == (1, 2, 260)
    assert sampling.logit_bias == ((5, -100.0),) and sampling.bad_words == (ids("fox"), ids(" fox"))
    assert first.priority == 3 and first.prompt_ids == ids(prompt) and len(first.cache_salt) == 16
    root = root_key(model="smollm2", revision="r1", cache_salt=first.cache_salt)
    assert first.block_keys == block_keys(root, ids(prompt), 16) and first.block_keys


async def test_seeds_and_salts(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    for _ in range(2):
        await post(client, COMPLETIONS, prompt=["same", "same"])
    seeds = [request.sampling.seed for batch in backend.batches for request in batch.requests]
    assert len(set(seeds)) == 4 and all(0 <= seed < 2**63 for seed in seeds)
    await post(client, COMPLETIONS, prompt=["same", "same"], seed=5)
    assert [request.sampling.seed for request in backend.batches[-1].requests] == [5, 5]
    assert backend.batches[-1].requests[0].cache_salt == b""
    salts = []
    for salt in ("a", "b", "a"):
        await post(client, COMPLETIONS, cache_salt=salt)
        salts.append(backend.batches[-1].requests[0].cache_salt)
    assert salts[0] == salts[2] != salts[1]


async def test_max_tokens_is_clamped_to_what_fits(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    for path, fields, expected in (
        (COMPLETIONS, {}, 16),
        (COMPLETIONS, {"prompt": [5] * 8190, "max_tokens": 2**31 - 1}, 2),
        (CHAT, {}, 8192 - 31),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 9}, 9),
    ):
        await post(client, path, **fields)
        assert backend.batches[-1].requests[0].sampling.max_tokens == expected


async def test_scoring_a_prompt(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda request: repeat(28120, 5)
    prompt = "Your answer: Yes"
    body = strict_json((await post(client, COMPLETIONS, prompt=prompt, max_tokens=0, echo=True, logprobs=1)).content)
    choice = body["choices"][0]
    assert choice["text"] == prompt and choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    block = choice["logprobs"]
    assert block["tokens"] == ["Your", " answer", ":", " Yes"] and block["text_offset"] == [0, 4, 11, 12]
    assert block["token_logprobs"][0] is None and block["top_logprobs"][0] is None
    assert all(isinstance(value, float) for value in block["token_logprobs"][1:])
    assert backend.batches[0].requests[0].sampling.prompt_logprobs == 1
    silent = strict_json((await post(client, COMPLETIONS, prompt=prompt, max_tokens=0)).content)
    assert silent["choices"][0]["text"] == "" and silent["choices"][0]["finish_reason"] == "length"
    events = await stream(client, COMPLETIONS, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    assert choices_of(events)[0].text == prompt and events[0]["choices"][0]["logprobs"] == block


async def test_echo_shows_what_the_model_saw(client: httpx.AsyncClient) -> None:
    body = strict_json((await post(client, COMPLETIONS, prompt="a\x13b", echo=True)).content)
    assert body["choices"][0]["text"] == "abhello" and body["usage"]["prompt_tokens"] == 2


async def test_prompts_of_every_kind(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    for prompt, expected in (
        ("hello", [[28120]]),
        (["hello", "Hi"], [[28120], [26843]]),
        ([28120, 2], [[28120, 2]]),
        ([[28120], [5, 6]], [[28120], [5, 6]]),
        ("abc<|im_end|>def", [[25276, 2, 1604]]),  # the client's own prompt: specials are parsed
    ):
        response = await post(client, COMPLETIONS, prompt=prompt, n=2)
        assert [list(request.prompt_ids) for request in backend.batches[-1].requests] == [p for p in expected for _ in range(2)]
        body = strict_json(response.content)
        assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(expected)))
        assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


@pytest.mark.parametrize("top", [None, 0, 5])
async def test_chat_logprobs(client: httpx.AsyncClient, backend: FakeBackend, top: int | None) -> None:
    text = "A 😀 fox"
    backend.script = lambda request: Script(tokens=(*ids(text), EOS))
    fields = {"logprobs": True} | ({} if top is None else {"top_logprobs": top})
    body = strict_json((await post(client, CHAT, **fields)).content)
    entries = body["choices"][0]["logprobs"]["content"]
    assert len(entries) == body["usage"]["completion_tokens"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == f"{text}<|im_end|>".encode()
    assert all(len(entry["top_logprobs"]) == (top or 0) for entry in entries)
    if top:
        assert entries[0]["top_logprobs"][-1]["logprob"] == -9999.0
    streamed = choices_of(await stream(client, CHAT, **fields))[0]
    assert [entry for block in streamed.logprobs for entry in block["content"]] == entries


@pytest.mark.parametrize("per_delta", [1, 2, 9])
@pytest.mark.parametrize("top", [0, 5])
async def test_completion_logprobs(client: httpx.AsyncClient, backend: FakeBackend, top: int, per_delta: int) -> None:
    text = "A 😀👩‍👧 fox"  # with tokens that bring no character
    backend.script = lambda request: Script(tokens=(*ids(text), EOS), per_delta=per_delta)
    body = strict_json((await post(client, COMPLETIONS, logprobs=top, stop=["x"])).content)
    block = body["choices"][0]["logprobs"]
    assert len(block["tokens"]) == len(block["token_logprobs"]) == len(block["text_offset"]) == body["usage"]["completion_tokens"]
    assert all(not alternatives if top == 0 else len(alternatives) >= top for alternatives in block["top_logprobs"])
    assert block["tokens"][1].startswith("bytes:") and block["text_offset"][0] == 0
    streamed = choices_of(await stream(client, COMPLETIONS, logprobs=top, stop=["x"]))[0]
    assert {key: [value for part in streamed.logprobs for value in part[key]] for key in block} == block


async def test_token_ids_beside_the_text(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    script = (*ids("A 😀 fox"), EOS)
    backend.script = lambda request: Script(tokens=script)
    chat = strict_json((await post(client, CHAT, return_token_ids=True)).content)
    assert chat["choices"][0]["token_ids"] == list(script) and len(chat["prompt_token_ids"]) == 31
    completion = strict_json((await post(client, COMPLETIONS, return_token_ids=True)).content)
    assert completion["choices"][0]["token_ids"] == list(script) and completion["choices"][0]["prompt_token_ids"] == [26843]
    for path in (CHAT, COMPLETIONS):
        events = await stream(client, path, return_token_ids=True)
        assert choices_of(events)[0].token_ids == list(script)
        first = events[0] if path == CHAT else events[0]["choices"][0]
        assert first["prompt_token_ids"] == (chat if path == CHAT else completion["choices"][0])["prompt_token_ids"]


async def test_end_tokens_are_not_text(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda request: Script(tokens=(28120, 260), stop_id=260)
    for fields, text, reason in (
        ({"stop_token_ids": [260]}, "hello", 260),
        ({"stop_token_ids": [260], "include_stop_str_in_output": True}, "hello the", 260),
        ({"stop_token_ids": [260], "stop": ["x"]}, "hello", 260),
        ({}, "hello", None),
    ):
        body = strict_json((await post(client, COMPLETIONS, **fields)).content)
        assert (body["choices"][0]["text"], body["choices"][0]["stop_reason"]) == (text, reason)
        assert body["usage"]["completion_tokens"] == 2
    backend.script = lambda request: Script(tokens=(28120, EOS, 28120), finish=FinishReason.LENGTH, stop_id=None)
    ignoring = {"ignore_eos": True}
    assert plain(await post(client, COMPLETIONS, **ignoring), COMPLETIONS) == ["hellohello"]
    assert plain(await post(client, COMPLETIONS, skip_special_tokens=False, **ignoring), COMPLETIONS) == ["hello<|im_end|>hello"]


async def test_stop_strings_wait_for_min_tokens(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda request: repeat(28120, 6)
    body = strict_json((await post(client, COMPLETIONS, stop="hello", min_tokens=2)).content)
    assert body["choices"][0]["text"] == "hellohello" and body["usage"]["completion_tokens"] == 3


async def test_continuing_a_message(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    messages = [*HI, {"role": "assistant", "content": "Once upon"}]
    await post(client, CHAT, messages=messages, continue_final_message=True)
    prompt = backend.batches[-1].requests[0].prompt_ids
    assert smollm2().tokenizer.decode(prompt, skip_special=False).endswith("<|im_start|>assistant\nOnce upon")
    await post(client, CHAT, messages=messages, add_generation_prompt=False)
    assert backend.batches[-1].requests[0].prompt_ids[-2:] == (EOS, 198)
    contradiction = await post(client, CHAT, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert contradiction.status_code == 400


async def test_rendering_and_encoding_of_long_texts_leave_the_loop(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from router.api.limits import TEXT_INLINE_BYTES_MAX
    from router.text.chat_template import ChatTemplate
    from router.text.tokenizer import Tokenizer

    threads: list[threading.Thread] = []
    for kind, name in ((ChatTemplate, "render"), (Tokenizer, "encode")):
        original = getattr(kind, name)

        def noted(self: Any, *args: Any, original: Any = original, **options: Any) -> Any:
            threads.append(threading.current_thread())
            return original(self, *args, **options)

        monkeypatch.setattr(kind, name, noted)
    long = "long " * TEXT_INLINE_BYTES_MAX
    await post(client, CHAT, messages=[{"role": "user", "content": long[:TEXT_INLINE_BYTES_MAX]}])
    await post(client, COMPLETIONS, prompt=long[:TEXT_INLINE_BYTES_MAX])
    assert len(threads) == 3 and threading.main_thread() not in threads
