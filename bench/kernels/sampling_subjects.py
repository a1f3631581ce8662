"""Subjects of the sampler: what all rows of a batch ask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.kernels.subject import Call, Ground, Subject
from kernels.reference import sampling as reference
from kernels.reference.sampling import Count, Number, SamplingRows, TokenLists
from kernels.triton import costs
from kernels.triton.sampling import sampling

WRONG_TOKENS_MAX = 0.02  # float32 may draw another token than float64 where two sums are all but equal


@dataclass(frozen=True, slots=True)
class Asking:
    """What every row asks; `rules`: penalties, biases, bans and a mask."""

    name: str
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    rules: bool = False
    logprobs: int = 0


GREEDY = Asking("greedy")
DRAWN = Asking("drawn", temperature=0.8)
FILTERED = Asking("top-k 50, top-p 0.9", temperature=0.8, top_k=50, top_p=0.9)
EVERYTHING = Asking("everything", temperature=1.1, top_p=0.95, min_p=0.01, rules=True, logprobs=5)


def sampler(rows: int, vocab: int, asking: Asking) -> Subject:
    def build(ground: Ground) -> Call:
        logits = ground.normal(torch.float32, rows, vocab, scale=3.0)
        asked = _rows(ground, rows, vocab, asking)
        run = reference.sampling if ground.exact else sampling

        def call() -> list[Tensor]:
            done = run(logits, asked, asking.logprobs)
            return [done.tokens, done.logprobs, done.statuses.double() + 1, *([done.top_logprobs] if asking.logprobs else [])]

        return call

    return Subject("sampling", f"R{rows} V{vocab} {asking.name}", torch.float32, build, costs.sampling(rows, vocab, 4), 1e-5)


def _rows(ground: Ground, rows: int, vocab: int, asking: Asking) -> SamplingRows:
    device = ground.device
    numbers = torch.zeros(rows, len(Number), dtype=torch.float64)
    numbers[:, Number.TEMPERATURE], numbers[:, Number.TOP_P], numbers[:, Number.MIN_P] = asking.temperature, asking.top_p, asking.min_p
    numbers[:, Number.REPETITION] = 1.2 if asking.rules else 1.0
    numbers[:, Number.PRESENCE] = 0.5 if asking.rules else 0.0
    counts = torch.zeros(rows, len(Count), dtype=torch.int64)
    counts[:, Count.SEED] = torch.arange(rows) + 1
    counts[:, Count.POSITION] = 100
    counts[:, Count.TOP_K] = asking.top_k
    if not asking.rules:
        return SamplingRows(numbers.to(device), counts.to(device))
    words = -(-vocab // 32)
    generator = torch.Generator().manual_seed(ground.seed)
    mask = torch.randint(-(1 << 31), 1 << 31, (rows, words), generator=generator).int()
    seen = torch.randint(-(1 << 31), 1 << 31, (rows, words), generator=generator).int()
    produced = torch.randint(0, 3, (rows, vocab), generator=generator).int()
    starts = torch.arange(rows + 1, dtype=torch.int32) * 4
    tokens = (torch.arange(rows * 4, dtype=torch.int32) % 4) * (vocab // 5)
    lists = TokenLists(starts.to(device), tokens.to(device), torch.full((rows * 4,), 0.7, device=device))
    told = [each.to(device) for each in (mask, seen, produced)]
    return SamplingRows(numbers.to(device), counts.to(device), told[0], told[1], told[2], lists, lists)


def tokens_agree(ours: list[Tensor], right: list[Tensor]) -> bool:
    """All but WRONG_TOKENS_MAX of the rows."""
    return bool((ours[0] != right[0]).double().mean() <= WRONG_TOKENS_MAX)
