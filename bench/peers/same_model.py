"""Whether a server serves the model we compare: its greedy texts against recorded ones.

Judged by ids, or by text where a server sends none: it may leave the recorded one only where the two likeliest tokens were
close (the bfloat16 bound of `bench.golden`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.answer import Expectation
from bench.connection import Target
from bench.drills.verdict import first_difference
from bench.golden import GAP_MAX_NAT, Golden, GoldenItem
from bench.load_client import LoadClient, json_call
from bench.peers.peer import Prompts
from bench.record import Outcome

STREAMS = 4
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class SameModel:
    """Counts of prompts. `failed`: no answer to judge; `near_tie`: another token, but at a near tie."""

    prompts: int
    equal: int
    near_tie: int
    different: int
    failed: int

    @property
    def holds(self) -> bool:
        return self.prompts > 0 and not self.different and not self.failed


async def check(url: str, golden: Golden, prompts: Prompts, decode: Decode) -> SameModel:
    """Prompts are sent as ids. `decode`: ids to text, special tokens left out."""
    client = LoadClient(Target.parse(url), timeout_s=180.0, reuse_connections=not prompts.new_connections)
    slots = asyncio.Semaphore(STREAMS)

    async def one(item: GoldenItem) -> float | None:
        body = {"model": prompts.model, "prompt": list(item.prompt_ids), "max_tokens": golden.max_new_tokens, "temperature": 0}
        if prompts.ask_ids:
            body["return_token_ids"] = True
        async with slots:
            record = await client.send(json_call("/v1/completions", body, Expectation(stream=False, keep=True, countable=False)))
        if record.outcome is not Outcome.COMPLETED:
            return math.nan
        ids = record.answer.token_ids.get(0)
        if ids is not None:
            return gap_of_ids(item, ids[:-1] if ids and ids[-1] in golden.eos_ids else ids)
        return gap_of_text(item, record.answer.texts.get(0, ""), decode)

    try:
        gaps = await asyncio.gather(*(one(item) for item in golden.items))
    finally:
        client.close()
    return count(gaps)


def gap_of_ids(item: GoldenItem, ids: Sequence[int]) -> float | None:
    """Nats between the two likeliest tokens where `ids` leave the recorded ones; None: they do not."""
    position = first_difference(item.ids, ids)
    return None if position is None else _gap(item, position)


def gap_of_text(item: GoldenItem, text: str, decode: Decode) -> float | None:
    """The same for a text. Where its next character continues a word, the token before may be the other one already."""
    if text.strip() == decode(item.ids).strip():
        return None
    kept = max(n for n in range(len(item.ids) + 1) if text.startswith(decode(item.ids[:n])))
    continues = kept > 0 and text[len(decode(item.ids[:kept])) :][:1].isalnum()
    return min(_gap(item, kept), _gap(item, kept - 1)) if continues else _gap(item, kept)


def _gap(item: GoldenItem, position: int) -> float:
    return item.gaps_nat[position] if position < len(item.gaps_nat) else math.inf


def count(gaps: Sequence[float | None]) -> SameModel:
    """`gaps` as by `gap_of_ids`; nan: no answer."""
    failed = sum(gap is not None and math.isnan(gap) for gap in gaps)
    near = sum(gap is not None and gap < GAP_MAX_NAT["bfloat16"] for gap in gaps)
    equal = sum(gap is None for gap in gaps)
    return SameModel(len(gaps), equal, near, len(gaps) - equal - near - failed, failed)
