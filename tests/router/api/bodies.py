"""Raw bodies, good and bad, with the statuses they may get."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.router.api.wire import CHAT, COMPLETIONS, HI
from tests.router.text.smollm2_vectors import INJECTION


@dataclass(frozen=True, slots=True)
class Body:
    case: str
    path: str
    raw: str
    statuses: tuple[int, ...] = (400,)
    param: str | None = None
    code: str | None = None
    prompt_tokens: int | None = None


def fields_of(fields: str, model: str = '"smollm2"') -> str:
    return "{" + f'"model":{model},{fields}' + "}"


def completion(case: str, fields: str, *, statuses: tuple[int, ...] = (400,), param: str | None = None, tokens: int | None = None) -> Body:
    return Body(case, COMPLETIONS, fields_of(fields), statuses, param, prompt_tokens=tokens)


def chat(case: str, fields: str, *, statuses: tuple[int, ...] = (400,), param: str | None = None, tokens: int | None = None) -> Body:
    return Body(case, CHAT, fields_of(fields), statuses, param, prompt_tokens=tokens)


def messages(value: Any) -> str:
    return '"max_tokens":2,"messages":' + json.dumps(value)


def nested(depth: int, opening: str, closing: str) -> str:
    return opening * depth + "1" + closing * depth


MESSAGES = '"messages":' + json.dumps(HI)
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"

EMPTY_PROMPTS = [
    completion("API-01", f'"prompt":{prompt},"max_tokens":4', param="prompt")
    for prompt in ('""', '[""]', "[]", "[[]]", '["ok",""]', '"\\u0013"', "null")
] + [completion("API-01", '"max_tokens":4', param="prompt")]

MAX_TOKENS = [
    completion("API-02", f'"prompt":"hi","max_tokens":{value}', param="max_tokens")
    for value in ("-1", "1.5", '"8"', "true", "2147483648", "9007199254740993", "1e30")
] + [
    chat("API-02", f'{MESSAGES},"max_tokens":0', param="max_tokens"),
    chat("API-02", f'{MESSAGES},"max_completion_tokens":0', param="max_completion_tokens"),
    completion("API-02", '"prompt":"hi","max_tokens":null', statuses=(200,)),
    completion("API-02", '"prompt":"Your answer: Yes","max_tokens":0,"echo":true,"logprobs":1', statuses=(200,), tokens=4),
]

NOT_NUMBERS = [chat("API-08", f'{MESSAGES},"temperature":{value}') for value in ("NaN", "Infinity", "-Infinity", "1e400")]

MODELS = [
    *(Body("API-10", CHAT, fields_of(MESSAGES, name), (404,), "model", "model_not_found") for name in ('"no-such-model"', '"SMOLLM2"')),
    Body("API-10", CHAT, fields_of(MESSAGES, '""'), (400, 404), "model"),
    *(Body("API-10", CHAT, fields_of(MESSAGES, value), (400,), "model") for value in ("null", '["smollm2"]', "5")),
    Body("API-10", CHAT, "{" + MESSAGES + "}", (400,), "model"),
]

SURROGATES = [
    body
    for text in ("\\ud800", "a\\udc8db", "end\\ud83d")
    for body in (
        completion("TOK-14", f'"prompt":"{text}","max_tokens":1'),
        chat("TOK-14", f'"messages":[{{"role":"user","content":"{text}"}}],"stop":["{text}"],"user":"{text}"'),
    )
] + [completion("TOK-14", '"prompt":"\\ud83d\\ude00","max_tokens":1,"echo":true', statuses=(200,), tokens=3)]

MESSAGE_FAULTS = [
    chat("TPL-03", messages(value), param=param)
    for value, param in (
        ([], "messages"),
        ("hi", "messages"),
        ([["user", "hi"]], "messages[0]"),
        ([None], "messages[0]"),
        ([{"role": "bogus", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([*HI, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        (HI * 2049, "messages"),
    )
]

MESSAGES_SERVED = [
    chat("TPL-02", messages([{"role": "user", "content": INJECTION}]), statuses=(200,), tokens=51),
    chat("TPL-03", messages([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]), statuses=(200,), tokens=31),
    chat("TPL-03", messages([{"role": "user", "content": [{"type": "text", "text": t} for t in "Hi"]}]), statuses=(200,), tokens=31),
    chat("TPL-03", messages([*HI, {"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}, *HI]), statuses=(200,)),
    chat("TPL-03", messages([*HI, {"role": "assistant", "content": None, "tool_calls": [{}]}, *HI]), statuses=(200,)),
    chat("TPL-03", messages([{"role": "developer", "content": "S"}, *HI]), statuses=(200,), tokens=16),
]

TEMPLATES = [
    chat("TPL-04", f'{MESSAGES},"chat_template":{json.dumps(LOOP)}', param="chat_template"),
    chat("TPL-04", f'{MESSAGES},"chat_template_kwargs":{{"chat_template":{json.dumps(LOOP)}}}', param="chat_template_kwargs.chat_template"),
    chat("TPL-04", f'{MESSAGES},"chat_template_kwargs":{{"chat_template":"{{{{ \'x\'*1000000000 }}}}"}}'),
    chat("TPL-04", f'{MESSAGES},"chat_template_kwargs":{{"messages":[]}}', param="chat_template_kwargs"),
    chat("TPL-04", f'{MESSAGES},"chat_template_kwargs":{{"enable_thinking":false}}', statuses=(200,)),
]

DEPTHS = [
    body
    for depth in (65, 1000, 10_000, 100_000)
    for body in (
        chat("SEC-04", f'{MESSAGES},"x":{nested(depth, "[", "]")}'),
        chat("SEC-04", f'{MESSAGES},"metadata":{nested(depth, chr(123) + chr(34) + "a" + chr(34) + ":", chr(125))}'),
        chat("SEC-04", f'{MESSAGES},"tools":[{{"function":{{"parameters":{nested(depth, "[", "]")}}}}}]'),
        chat("SEC-04", f'"messages":[{{"role":"user","content":{nested(depth, "[", "]")}}}]'),
    )
] + [chat("SEC-04", f'{MESSAGES},"x":{nested(63, "[", "]")}', statuses=(200,))]

RANGES = [
    chat("README", f'{MESSAGES},"{name}":{value}', param=name)
    for name, values in {
        "n": ("0", "129", '"2"'),
        "temperature": ("-0.1", "2.1", "true", '"1"', "999999"),
        "top_p": ("0", "-1", "1.01"),
        "min_p": ("-0.1", "1.1"),
        "top_k": ("-2", "-5", "1.5"),
        "repetition_penalty": ("0", "2.1"),
        "presence_penalty": ("-2.1", "2.1"),
        "frequency_penalty": ("-2.1", "2.1"),
        "top_logprobs": ("-1", "21", "5"),
        "seed": ("1.5", "9223372036854775808"),
        "stop": ('""', "5", json.dumps(["x"] * 17), json.dumps("x" * 1025), '["a",5]'),
        "stop_token_ids": ("[49152]", "[-1]", '["a"]', json.dumps([1] * 257)),
        "allowed_token_ids": ("[]", "[49152]", "[true]", json.dumps([1] * 524_289)),
        "logit_bias": ("[]", '{"x":1}', '{"1":101}', '{"1":true}', '{"49152":1}', json.dumps({str(i): 0 for i in range(1025)})),
        "bad_words": (json.dumps(["x"] * 257), '""', '[""]'),
        "min_tokens": ("-1",),
        "stream_options": ('{"include_usage":true}',),
        "cache_salt": (json.dumps("x" * 257),),
        "tools": ('[{"type":"function","function":{"name":"f"}}]',),
        "response_format": ('{"type":"json_object"}',),
        "tool_choice": ('"required"',),
        "guided_regex": ('"["',),
        "best_of": ("2",),
    }.items()
    for value in values
] + [
    completion("README", '"prompt":"hi","logprobs":21', param="logprobs"),
    completion("README", '"prompt":"hi","suffix":"x"', param="suffix"),
    completion("README", '"prompt":"hi","max_tokens":2,"min_tokens":3', param="min_tokens"),
    completion("README", f'"prompt":{json.dumps(["a"] * 65)},"n":2', param="n"),
    completion("README", f'"prompt":{json.dumps(["a"] * 129)}', param="prompt"),
    completion("README", '"prompt":[49152]', param="prompt"),
    completion("README", '"prompt":[-1]', param="prompt"),
    completion("README", '"prompt":["a",1]', param="prompt"),
    completion("README", f'"prompt":{json.dumps([5] * 8192)}', param="prompt"),
    completion("README", f'"prompt":{json.dumps([5] * 8191)},"max_tokens":99', statuses=(200,), tokens=8191),
    completion("README", f'"prompt":{json.dumps(["a"] * 64)},"n":2,"max_tokens":1', statuses=(200,), tokens=64),
]

SERVED = [
    chat("README", f'{MESSAGES},"{name}":{value}', statuses=(200,))
    for name, value in {
        "top_k": "1000000000",
        "min_p": "1",
        "tools": "[]",
        "response_format": '{"type":"text"}',
        "tool_choice": "null",
        "unknown_field": '{"a":[1]}',
        "seed": "-9223372036854775808",
        "stop": json.dumps(["x" * 1024] * 16),
        "n": "1",
    }.items()
]

NOT_OBJECTS = [Body("JSON", CHAT, raw) for raw in ("", "[]", "5", '"x"', "{", "{}x", '{"model":')]

SHORT = [
    *EMPTY_PROMPTS,
    *MAX_TOKENS,
    *NOT_NUMBERS,
    *MODELS,
    *SURROGATES,
    *MESSAGE_FAULTS,
    *MESSAGES_SERVED,
    *TEMPLATES,
    *DEPTHS,
    *RANGES,
    *SERVED,
    *NOT_OBJECTS,
]


def many_bad_messages() -> bytes:
    """500 messages with three faults and a long string each: API-07."""
    return json.dumps({"model": "smollm2", "messages": [{"role": 5, "content": 7, "name": [], "x": "z" * 1000}] * 500}).encode()
