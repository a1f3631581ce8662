"""Checks a runner against golden outputs: greedy ids and, teacher-forced, log probabilities of the golden tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from replica.step import Row, Step
from tests.replica.model_driver import Driver, greedy


@dataclass(frozen=True)
class Divergence:
    """Where greedy ids first leave the golden ones, and how close the golden top two are there (nat)."""

    item: str
    position: int
    gap: float


def golden_length(item: dict[str, Any]) -> int:
    """Tokens that count: up to and with the end token."""
    stop = item["fp32_stop_index"]
    return len(item["fp32_ids"]) if stop is None else int(stop) + 1


def divergences(driver: Driver, items: list[dict[str, Any]]) -> list[Divergence]:
    """All items in one batch, greedily, to their golden length."""
    running = [driver.add(item["prompt_ids"], greedy(golden_length(item))) for item in items]
    found = []
    for item, output in zip(items, driver.run(running), strict=True):
        golden = item["fp32_ids"][: golden_length(item)]
        position = next((i for i, (ours, theirs) in enumerate(zip(output, golden, strict=True)) if ours != theirs), None)
        if position is not None:
            first, second = (logprob for _, logprob in item["fp32_top5"][position][:2])
            found.append(Divergence(item["id"], position, first - second))
    return found


def mean_logprob_error(driver: Driver, items: list[dict[str, Any]]) -> float:
    """Mean |Δ log p| of the golden token over all positions, each computed after the golden tokens before it."""
    differences = []
    for number, item in enumerate(items):
        golden, prompt = item["fp32_ids"][: golden_length(item)], item["prompt_ids"]
        tokens = (prompt + golden)[:-1]
        blocks = driver.add(tokens, greedy(1)).blocks
        chunk = driver.runner.limits.max_num_batched_tokens
        scores = []
        for start in range(0, len(tokens) + 1, chunk - 1):  # chunks overlap by one token, as scored chunks do
            part = (prompt + golden)[start : start + chunk]
            if len(part) < 2:
                break
            row = Row(number, part, start, blocks, None, score_from=start + 1)
            scores += driver.runner.execute(Step(number, (row,))).outcomes[0].scores
        for score, top in zip(scores[len(prompt) - 1 :], item["fp32_top5"], strict=False):
            expected = dict(top)
            if score.token_id in expected:
                differences.append(abs(score.logprob - expected[score.token_id]))
    return sum(differences) / len(differences)
