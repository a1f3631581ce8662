"""Recorded decode steps over Triton's plans: a growing context is replayed, not recorded again for each split that it gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.batch import CacheLayout, PagedBatch
from kernels.ops import choose_operators
from replica.graphed_forward import GraphedForward
from replica.parallel.group import SingleRank
from replica.step_inputs import StepInputs
from tests.kernels import triton_interpreter  # noqa: F401 - for what it installs
from tests.replica.host_device import HostDevice

LAYOUT = CacheLayout(1, 16, 16)
OPERATORS = choose_operators(torch.device("cpu"), "triton")
PAGES = 300
WINDOWS = (None, 300)
CONFIG = SimpleNamespace(layer_windows=WINDOWS, vocab_size=3)


class OneAttention:
    """A model whose hidden states are an attention over the pool for each window, of queries that its tokens name; or nothing at all."""

    config = CONFIG

    def __init__(self, computes: bool) -> None:
        self._computes = computes

    def forward(self, token_ids: Tensor, positions: Tensor, pool: Tensor, plans: Mapping[int | None, Any]) -> Tensor:
        if not self._computes:
            return torch.zeros(token_ids.numel(), 32)
        queries = torch.sin(token_ids[:, None] * torch.arange(1, 33) * 0.1)
        return torch.cat([OPERATORS.paged_attention(queries, pool[0], plans[window], 0.25) for window in WINDOWS], dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden[:, :3]


def graphed(computes: bool) -> tuple[GraphedForward, HostDevice]:
    device = HostDevice()
    pool = torch.randn(1, PAGES, 2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    model: Any = OneAttention(computes)
    return GraphedForward(model, OPERATORS, LAYOUT, device, pool, tp=SingleRank(), rows_max=4, tokens_max=8), device


def decodes(contexts: Sequence[int]) -> StepInputs:
    """A step of rows that have `contexts` tokens computed, on pages that they share."""
    starts = np.array(contexts, np.int32)
    counts, rows = np.ones_like(starts), np.arange(starts.size)
    tables = np.random.default_rng(7).permutation(PAGES - 1)[: max(contexts) // 16 + 1].astype(np.int32)
    batch = PagedBatch(starts, counts, np.stack([tables] * starts.size))
    return StepInputs(rows + 5, batch.positions.astype(np.int64), batch, tuple(rows.tolist()), (), rows, rows)


@torch.inference_mode()
def captures_of_growing_contexts() -> tuple[int, int]:
    """(at start, with contexts up to 2,000 tokens)"""
    forward, device = graphed(computes=False)
    forward.warm()
    before = device.captures
    for context in range(1, 2000, 50):
        forward.compute(decodes([context, context // 2, 3 * context // 4]))
    assert forward.replays + device.captures == len(range(1, 2000, 50)) + before
    return before, device.captures


def test_a_growing_context_is_replayed() -> None:
    """One more when the table becomes wider, one more when the rows fill more than half of it."""
    assert captures_of_growing_contexts() == (3, 3 + 2)


def test_without_padded_lists_every_split_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    padded = GraphedForward._padded
    monkeypatch.setattr(GraphedForward, "_padded", lambda self, batch, size: replace(padded(self, batch, size), recurring=False))
    assert captures_of_growing_contexts()[1] > 3 + 10


@torch.inference_mode()
def test_replayed_with_padded_lists_is_what_is_computed_without() -> None:
    """Bit for bit: what pads does nothing."""
    forward, device = graphed(computes=True)
    for contexts in ([900, 255, 256], [17, 1, 700], [1030, 512], [0]):
        plain = decodes(contexts)
        plans = {window: OPERATORS.plan_attention(plain.batch, LAYOUT, torch.float32, device.torch_device, window) for window in WINDOWS}
        right = forward.model.forward(torch.from_numpy(plain.token_ids), torch.from_numpy(plain.positions), forward.pool, plans)
        for _ in range(2):  # recorded, then replayed
            assert torch.equal(forward.compute(plain).hidden, right), contexts
    assert forward.replays == 5, "the second batch was not recorded: it fits the first one's record"
