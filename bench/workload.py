"""What is asked: the works a–e of the comparison table, as seeded lists of calls with exact lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.answer import Expectation
from bench.load_client import Call, json_call

FIRST_PLAIN_ID = 1_000  # below lie special tokens and single bytes
LAST_PLAIN_ID = 30_000  # inside every vocabulary met so far


@dataclass(frozen=True, slots=True)
class Work:
    """A closed-loop work. Each prompt is `shared_tokens` common ones and `prompt_tokens` of its own."""

    name: str
    streams: int
    prompt_tokens: int
    output_tokens: int
    requests: int
    shared_tokens: int = 0

    @property
    def description(self) -> str:
        streams = "1 stream" if self.streams == 1 else f"{self.streams} streams"
        prompt = f"{self.shared_tokens} shared + {self.prompt_tokens}" if self.shared_tokens else f"{self.prompt_tokens}"
        return f"{streams} {prompt} in / {self.output_tokens} out"


WORKS = (
    Work("a", streams=1, prompt_tokens=128, output_tokens=128, requests=4),
    Work("b", streams=8, prompt_tokens=128, output_tokens=128, requests=24),
    Work("c", streams=32, prompt_tokens=256, output_tokens=128, requests=64),
    Work("d", streams=16, prompt_tokens=64, output_tokens=64, requests=48, shared_tokens=512),
    Work("e", streams=1, prompt_tokens=1_500, output_tokens=8, requests=3),
)


@dataclass(frozen=True, slots=True)
class PromptStyle:
    """How prompts are written for a server: as token ids (exact lengths), or as text where it takes no ids."""

    model: str
    as_text: bool = False
    ask_ids: bool = True  # `return_token_ids`: lets every single token be counted


def calls_of(work: Work, style: PromptStyle, seed: int) -> list[Call]:
    """The work's calls. Prompts of different (work, seed) share no prefix; inside one only `shared_tokens` do."""
    draw = random.Random(f"{work.name}/{seed}")
    shared = random_ids(draw, work.shared_tokens)
    return [completion(shared + random_ids(draw, work.prompt_tokens), work.output_tokens, style) for _ in range(work.requests)]


def random_ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randint(FIRST_PLAIN_ID, LAST_PLAIN_ID) for _ in range(count)]


def completion(prompt_ids: list[int], output_tokens: int, style: PromptStyle) -> Call:
    """A streamed greedy completion of exactly `output_tokens` tokens."""
    body: dict[str, object] = {
        "model": style.model,
        "prompt": " ".join(f"w{i}" for i in prompt_ids[::4]) if style.as_text else prompt_ids,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if style.ask_ids:
        body["return_token_ids"] = True
    return json_call(
        "/v1/completions",
        body,
        Expectation(prompt_tokens=None if style.as_text else len(prompt_ids), completion_tokens=output_tokens),
    )
