"""How a call is written for a server: token ids for exact lengths, or text and messages where it takes no ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.answer import Expectation
from bench.load_client import Call, json_call
from bench.prompt_ids import FIRST_PLAIN_ID, LAST_PLAIN_ID
from bench.prompt_words import text_of
from bench.workload import TimedCall


@dataclass(frozen=True, slots=True)
class PromptStyle:
    """What the server is asked for, and how."""

    model: str
    as_text: bool = False
    ask_ids: bool = True  # `return_token_ids`: lets every single token be counted
    chat: bool = False  # /v1/chat/completions; the prompt is then text


def call_of(timed: TimedCall, style: PromptStyle, salt: str = "") -> Call:
    """The request, ready to be sent. Another salt is another text of the same lengths and the same structure of prefixes."""
    return completion(
        timed.prompt_ids(salt),
        timed.output_tokens,
        style,
        cancel_after_s=timed.cancel_after_s,
        group=timed.group,
        new_connection=timed.new_connection,
    )


def completion(
    prompt_ids: Sequence[int],
    output_tokens: int,
    style: PromptStyle,
    *,
    cancel_after_s: float | None = None,
    group: str = "",
    new_connection: bool = False,
) -> Call:
    """A streamed greedy completion of exactly `output_tokens` tokens."""
    body: dict[str, object] = {
        "model": style.model,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    as_text = style.as_text or style.chat
    prompt = text_of(prompt_ids) if as_text else list(prompt_ids)
    if style.chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if style.ask_ids:
        body["return_token_ids"] = True
    return json_call(
        "/v1/chat/completions" if style.chat else "/v1/completions",
        body,
        Expectation(
            prompt_tokens=None if as_text else len(prompt_ids),
            text_tokens=len(prompt_ids) if as_text else None,
            completion_tokens=output_tokens,
        ),
        cancel_after_s=cancel_after_s,
        group=group,
        new_connection=new_connection,
    )


def random_ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randint(FIRST_PLAIN_ID, LAST_PLAIN_ID) for _ in range(count)]
