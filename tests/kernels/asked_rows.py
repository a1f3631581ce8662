"""What requests ask (replica's Draw) as the tensors that the fused sampler takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.reference.sampling import SamplingRows, TokenLists
from replica.contract.messages import SamplingParams
from replica.logit_rules import banned_now
from replica.step import Draw

EOS = frozenset({2})


class Mask:
    """Every `step`-th token, or none."""

    def __init__(self, vocab: int, step: int = 3) -> None:
        self._allowed = np.arange(vocab) % step == 0 if step else np.zeros(vocab, np.bool_)

    def allowed(self, output_ids: Sequence[int]) -> np.ndarray:
        return self._allowed


def draw(prompt: Sequence[int] = (4, 5), output: Sequence[int] = (), choice: int = 0, mask: Any = None, **changes: Any) -> Draw:
    return Draw(SamplingParams(**{"seed": 7, "max_tokens": 64, "temperature": 0.0, **changes}), choice, prompt, output, mask)


def rows_of(draws: Sequence[Draw], vocab: int) -> SamplingRows:
    """Tensors that no draw needs are None."""
    params = [each.sampling for each in draws]
    penalties = any(p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty for p in params)
    return SamplingRows(
        torch.tensor(
            [[p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params],
            dtype=torch.float64,
        ),
        torch.tensor([[p.seed, d.choice, len(d.prompt_ids) + len(d.output_ids), p.top_k] for p, d in zip(params, draws, strict=True)]),
        _words(vocab, draws, _allowed) if any(d.mask or d.sampling.allowed_token_ids is not None for d in draws) else None,
        _words(vocab, draws, lambda each, size: np.isin(np.arange(size), each.prompt_ids)) if penalties else None,
        torch.stack([torch.bincount(torch.tensor([*d.output_ids], dtype=torch.int64), minlength=vocab) for d in draws]).int()
        if penalties
        else None,
        _lists([p.logit_bias for p in params], vocab) if any(p.logit_bias for p in params) else None,
        _lists([[(t, 0.0) for t in set(banned_now(d, EOS))] for d in draws], vocab) if any(banned_now(d, EOS) for d in draws) else None,
    )


def _allowed(each: Draw, size: int) -> np.ndarray:
    ids = each.sampling.allowed_token_ids
    allowed = np.ones(size, np.bool_) if ids is None else np.isin(np.arange(size), ids)
    return allowed if each.mask is None else allowed & each.mask.allowed(each.output_ids)


def _words(vocab: int, draws: Sequence[Draw], bits_of: Callable[[Draw, int], np.ndarray]) -> Tensor:
    bits = np.zeros((len(draws), -(-vocab // 32) * 32), np.bool_)
    for row, each in enumerate(draws):
        bits[row, :vocab] = bits_of(each, vocab)
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def _lists(entries: Sequence[Iterable[tuple[int, float]]], vocab: int) -> TokenLists:
    inside = [sorted((pair for pair in each if 0 <= pair[0] < vocab), key=lambda pair: pair[0]) for each in entries]
    starts = np.cumsum([0, *(len(each) for each in inside)])
    flat = [pair for each in inside for pair in each]
    return TokenLists(
        torch.from_numpy(starts.astype(np.int32)),
        torch.tensor([token for token, _ in flat], dtype=torch.int32),
        torch.tensor([value for _, value in flat], dtype=torch.float32),
    )
