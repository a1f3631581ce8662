"""Baselines that weigh prefix and load against each other: llm-d's scorers, Dynamo's cost, LMetric's product."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from router.policy.request_view import RequestView
from router.policy.scoring import Candidate, Choice, least_of


class LlmdWeights:
    """3 × matched part of the prompt + 2 × (1 − queue, relative to the longest and shortest) + 2 × (1 − KV usage); the most."""

    PREFIX, QUEUE, KV = 3.0, 2.0, 2.0

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Choice:
        queues = [one.view.load.waiting + one.view.claims.requests for one in candidates]
        shortest, spread = min(queues), max(queues) - min(queues)
        costs = []
        for one, queue in zip(candidates, queues, strict=True):
            prefix = one.forecast.cached_tokens / request.prompt_tokens
            idle = 1.0 - (queue - shortest) / spread if spread else 1.0
            load = one.view.load
            unused = (load.free_blocks + load.evictable_blocks) / one.view.limits.num_blocks
            costs.append(-(self.PREFIX * prefix + self.QUEUE * idle + self.KV * unused))
        return least_of(candidates, costs, self._random, "weights")


class DynamoCost:
    """Blocks of this request to prefill there + blocks that all requests there occupy with it; the least (temperature 0)."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Choice:
        costs = []
        for one in candidates:
            held = one.view.load.context_tokens + one.queued_tokens + request.prompt_tokens
            costs.append((one.forecast.new_tokens + held) / one.view.limits.block_size)
        return least_of(candidates, costs, self._random, "cost")


class LMetric:
    """Tokens to prefill there, this request's included, × requests there with it; the least."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Choice:
        costs = [(one.queued_tokens + one.forecast.new_tokens) * one.forecast.batch for one in candidates]
        return least_of(candidates, costs, self._random, "product")
