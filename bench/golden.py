"""Client-side check of recorded greedy outputs: does the served model say what transformers says, token for token?

`python -m bench.golden GOLDEN.json [URL] --dtype float32|bfloat16`. float32: the recorded ids up to the end token, but for
positions where the two likeliest tokens are less than 1e-3 nat apart. bfloat16: a first divergence only where the float32
gap is under 0.3 nat, and, teacher-forced, a mean |Δ log p| of the chosen tokens of at most 0.06.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from bench import result, stack
from bench.answer import Expectation
from bench.connection import Target
from bench.drills.verdict import first_difference, read_scores
from bench.load_client import Call, LoadClient, json_call
from bench.record import Outcome, RequestRecord
from bench.result import Metric, Result

GAP_MAX_NAT = {"float32": 1e-3, "bfloat16": 0.3}
MEAN_DELTA_MAX_NAT = {"float32": 1e-3, "bfloat16": 0.06}
STREAMS = 4


class _Item(msgspec.Struct):
    id: int
    kind: str
    prompt_ids: list[int]
    fp32_ids: list[int]
    fp32_text: str
    fp32_stop_index: int | None
    fp32_top5: list[list[tuple[int, float]]]
    messages: list[dict[str, str]] | None = None


class _File(msgspec.Struct):
    max_new_tokens: int
    eos_ids: list[int]
    items: list[_Item]


@dataclass(frozen=True, slots=True)
class GoldenItem:
    """One recorded output, cut before its end token."""

    number: int
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of ids, float32
    gaps_nat: tuple[float, ...]  # between the two likeliest, one more than ids where it stopped by itself
    text: str
    messages: tuple[dict[str, str], ...]  # empty: not a chat


@dataclass(frozen=True, slots=True)
class Golden:
    max_new_tokens: int
    eos_ids: frozenset[int]
    items: tuple[GoldenItem, ...]


@dataclass(frozen=True, slots=True)
class ItemVerdict:
    """`divergence`: position of the first other token, None if there is none. `problem`: the answer could not be judged."""

    number: int
    divergence: int | None = None
    gap_nat: float = 0.0
    mean_delta_nat: float | None = None
    chat_text_equal: bool | None = None
    problem: str = ""


def load(path: Path) -> Golden:
    """Raises OSError, or msgspec.MsgspecError for a file of another shape."""
    file = msgspec.json.decode(path.read_bytes(), type=_File)
    return Golden(file.max_new_tokens, frozenset(file.eos_ids), tuple(_item(item) for item in file.items))


def _item(item: _Item) -> GoldenItem:
    end = len(item.fp32_ids) if item.fp32_stop_index is None else item.fp32_stop_index
    return GoldenItem(
        number=item.id,
        prompt_ids=tuple(item.prompt_ids),
        ids=tuple(item.fp32_ids[:end]),
        logprobs=tuple(dict(top).get(token, math.nan) for token, top in zip(item.fp32_ids[:end], item.fp32_top5, strict=False)),
        gaps_nat=tuple(top[0][1] - top[1][1] for top in item.fp32_top5[: end + 1]),
        text=item.fp32_text,
        messages=tuple(item.messages or ()),
    )


async def check(url: str, golden: Golden) -> list[ItemVerdict]:
    """Each item three times: generated from its ids, generated as a chat, and teacher-forced. A few at a time, as batches."""
    client = LoadClient(Target.parse(url), timeout_s=180.0)
    slots = asyncio.Semaphore(STREAMS)

    async def send(call: Call) -> RequestRecord:
        async with slots:
            return await client.send(call)

    async def one(item: GoldenItem) -> ItemVerdict:
        generated, forced = await asyncio.gather(send(_generation(item, golden)), send(_teacher_forced(item)))
        chat = await send(_chat(item, golden)) if item.messages else None
        return judge(item, golden.eos_ids, generated, forced, chat)

    try:
        return list(await asyncio.gather(*(one(item) for item in golden.items)))
    finally:
        client.close()


def judge(
    item: GoldenItem, eos_ids: frozenset[int], generated: RequestRecord, forced: RequestRecord, chat: RequestRecord | None
) -> ItemVerdict:
    for record in (generated, forced, chat):
        if record is not None and record.outcome is not Outcome.COMPLETED:
            return ItemVerdict(item.number, problem="; ".join(record.problems) or f"status {record.status}")
    ids = generated.answer.token_ids.get(0)
    if ids is None:
        return ItemVerdict(item.number, problem="the server sends no token ids")
    if ids and ids[-1] in eos_ids:
        ids = ids[:-1]
    position = first_difference(item.ids, ids)
    gap = 0.0 if position is None else item.gaps_nat[position] if position < len(item.gaps_nat) else math.inf
    return ItemVerdict(
        item.number,
        position,
        gap,
        mean_delta(item, forced),
        None if chat is None else chat.answer.texts.get(0, "") == item.text,
    )


def mean_delta(item: GoldenItem, forced: RequestRecord) -> float | None:
    """Mean |log p − recorded log p| over the recorded tokens; None when the server scored another number of tokens."""
    scores = read_scores(forced.answer.logprobs.get(0, [])).logprobs
    served = scores[len(item.prompt_ids) : len(item.prompt_ids) + len(item.ids)]
    deltas = [abs(a - b) for a, b in zip(served, item.logprobs, strict=False) if a is not None and not math.isnan(b)]
    return statistics.fmean(deltas) if deltas and len(served) == len(item.ids) else None


def _generation(item: GoldenItem, golden: Golden) -> Call:
    body = {
        "model": "smollm2",
        "prompt": list(item.prompt_ids),
        "max_tokens": golden.max_new_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    return json_call("/v1/completions", body, Expectation(stream=False, prompt_tokens=len(item.prompt_ids), keep=True))


def _chat(item: GoldenItem, golden: Golden) -> Call:
    body = {"model": "smollm2", "messages": list(item.messages), "max_tokens": golden.max_new_tokens, "temperature": 0}
    return json_call("/v1/chat/completions", body, Expectation(stream=False, keep=True))


def _teacher_forced(item: GoldenItem) -> Call:
    """The prompt and the recorded tokens, echoed with their log probabilities; nothing is generated."""
    body = {"model": "smollm2", "prompt": [*item.prompt_ids, *item.ids], "max_tokens": 0, "temperature": 0, "echo": True, "logprobs": 1}
    return json_call("/v1/completions", body, Expectation(stream=False, keep=True, countable=False))


def metrics_of(verdicts: list[ItemVerdict], dtype: str) -> tuple[Metric, ...]:
    """Against the bounds of the dtype. A chat's text must be the recorded one wherever its ids may not differ (float32)."""
    judged = [verdict for verdict in verdicts if not verdict.problem]
    gap_max = GAP_MAX_NAT[dtype]
    wrong = [verdict for verdict in judged if verdict.divergence is not None and verdict.gap_nat >= gap_max]
    deltas = [verdict.mean_delta_nat for verdict in judged if verdict.mean_delta_nat is not None]
    chats = [verdict for verdict in judged if verdict.chat_text_equal is False and verdict.divergence is None]
    metrics = [
        result.at_most("not_judged", float(len(verdicts) - len(judged)), 0, "prompts"),
        result.at_most("diverged_beyond_gap", float(len(wrong)), 0, "prompts"),
        result.plain("diverged_at_near_tie", float(sum(v.divergence is not None for v in judged) - len(wrong)), "prompts"),
        result.at_most("mean_delta_log_p", max(deltas, default=None), MEAN_DELTA_MAX_NAT[dtype], "nat, worst prompt"),
        result.plain("mean_delta_log_p.all", statistics.fmean(deltas) if deltas else None, "nat"),
        result.at_most("not_scored", float(len(judged) - len(deltas)), 0, "prompts"),
    ]
    if dtype == "float32":
        metrics.append(result.at_most("chat_text_differs", float(len(chats)), 0, "prompts"))
    return tuple(metrics)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("golden", type=Path, help="recorded outputs")
    parser.add_argument("url", nargs="?", help="a running server of that dtype; without it a stack is started and stopped")
    parser.add_argument("--dtype", choices=sorted(GAP_MAX_NAT), default="float32")
    options = parser.parse_args()
    try:
        golden = load(options.golden)
    except (OSError, msgspec.MsgspecError) as error:
        print(f"cannot read {options.golden}: {error}")
        return 2
    arguments = ["--replicas", "1", "--dtype", options.dtype, "--queue-time-slo-s", "120"]  # judged by words, not by speed
    try:
        with stack.served(arguments, url=options.url) as url:
            verdicts = uvloop.run(check(url, golden))
    except stack.StackError as error:
        print(error)
        return 1
    details: dict[str, object] = {"verdicts": [msgspec.to_builtins(verdict) for verdict in verdicts]}
    outcome = Result("golden", {"dtype": options.dtype}, metrics=metrics_of(verdicts, options.dtype), details=details)
    result.show(outcome)
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
