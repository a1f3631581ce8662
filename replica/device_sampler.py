"""Draws on the device that holds the logits: one fixed sequence of kernels, whatever the rows ask, and what it says as outcomes.

The meaning is that of replica/sampler.py; only what rows ask goes to the device, and only tokens come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.reference.sampling import Count, Number, Sampled, SamplingRows, Status, TokenLists
from replica.contract.messages import TokenLogprobs
from replica.logit_rules import banned_now
from replica.sampler import NOT_FINITE
from replica.step import Draw, Outcome

NOTHING_LEFT = "allowed_token_ids and the mask leave no token"
_WORD = 32  # tokens of a word of a mask
_SIGN, _WRAP = 1 << 63, 1 << 64

Kernel = Callable[[Tensor, SamplingRows, int], Sampled]
Bools = npt.NDArray[np.bool_]


def sample_on_device(kernel: Kernel, logits: Tensor, draws: Sequence[Draw], eos_token_ids: frozenset[int]) -> list[Outcome]:
    """One outcome for each row of logits [R, V], float32, wherever they are. As `sample`: a row's error ends that row alone."""
    errors: dict[int, str] = {}
    rows = pack_rows(draws, logits.shape[1], eos_token_ids, errors)
    top = max((draw.sampling.logprobs or 0 for draw in draws), default=0)
    done = kernel(logits.contiguous(), _moved(rows, logits.device), min(top, logits.shape[1]))
    tokens, statuses, logprobs = done.tokens.tolist(), done.statuses.tolist(), done.logprobs.tolist()
    ids, values = done.top_tokens.tolist(), done.top_logprobs.tolist()
    outcomes = []
    for row, draw in enumerate(draws):
        error = errors.get(row) or _message(statuses[row])
        if error:
            outcomes.append(Outcome(error=error))
            continue
        asked = draw.sampling.logprobs
        best = tuple(zip(ids[row][:asked], values[row][:asked], strict=True)) if asked else ()
        scores = None if asked is None else TokenLogprobs(token_id=tokens[row], logprob=logprobs[row], top=best)
        outcomes.append(Outcome(token=tokens[row], logprobs=scores))
    return outcomes


def pack_rows(draws: Sequence[Draw], vocab: int, eos_token_ids: frozenset[int], errors: dict[int, str]) -> SamplingRows:
    """What the draws ask, on the host. A row whose parameters cannot be applied is told in `errors` and asks nothing."""
    numbers = np.zeros((len(draws), len(Number)))
    counts = np.zeros((len(draws), len(Count)), np.int64)
    allowed: list[Bools | None] = []
    for row, draw in enumerate(draws):
        s = draw.sampling
        numbers[row] = (s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
        seed = (s.seed + _SIGN) % _WRAP - _SIGN
        counts[row] = (seed, draw.choice, len(draw.prompt_ids) + len(draw.output_ids), s.top_k)
        try:
            allowed.append(_allowed(draw, vocab))
        except Exception as error:  # whatever a request's parameters bring about ends that request alone
            errors[row] = f"sampling parameters could not be applied: {error}"
            allowed.append(None)
    return SamplingRows(
        torch.from_numpy(numbers),
        torch.from_numpy(counts),
        _masks(allowed, vocab) if any(each is not None for each in allowed) else None,
        _prompts_seen(draws, vocab) if any(draw.sampling.repetition_penalty != 1.0 for draw in draws) else None,
        _output_counts(draws, vocab) if any(_penalizes(draw) for draw in draws) else None,
        _lists([list(draw.sampling.logit_bias) for draw in draws], vocab),
        _lists([[(token, 0.0) for token in banned_now(draw, eos_token_ids)] for draw in draws], vocab),
    )


def _message(status: int) -> str:
    if status == Status.FINE:
        return ""
    return f"sampling parameters could not be applied: {NOTHING_LEFT}" if status == Status.NOTHING_ALLOWED else NOT_FINITE


def _penalizes(draw: Draw) -> bool:
    s = draw.sampling
    return s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0


def _allowed(draw: Draw, vocab: int) -> Bools | None:
    ids, mask = draw.sampling.allowed_token_ids, draw.mask
    if ids is None and mask is None:
        return None
    passing = np.ones(vocab, np.bool_)
    if ids is not None:
        passing[:] = False
        passing[[token for token in ids if 0 <= token < vocab]] = True
    if mask is not None:
        own = mask.allowed(draw.output_ids)
        if own.shape != passing.shape or own.dtype != np.bool_:
            raise ValueError(f"the mask has {own.shape} entries of {own.dtype}, {passing.shape} of bool are expected")
        passing &= own
    return passing


def _words(bits: Bools) -> Tensor:
    """[R, V] → [R, ⌈V / 32⌉] int32, bit t % 32 of word t // 32 for token t."""
    padded = np.pad(bits, ((0, 0), (0, -bits.shape[1] % _WORD)))
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


def _masks(allowed: Sequence[Bools | None], vocab: int) -> Tensor:
    everything = np.ones(vocab, np.bool_)
    return _words(np.stack([everything if each is None else each for each in allowed]))


def _prompts_seen(draws: Sequence[Draw], vocab: int) -> Tensor:
    seen = np.zeros((len(draws), vocab), np.bool_)
    for row, draw in enumerate(draws):
        if draw.sampling.repetition_penalty != 1.0:
            seen[row, [token for token in draw.prompt_ids if 0 <= token < vocab]] = True
    return _words(seen)


def _output_counts(draws: Sequence[Draw], vocab: int) -> Tensor:
    counted = np.zeros((len(draws), vocab), np.int32)
    for row, draw in enumerate(draws):
        if _penalizes(draw):
            np.add.at(counted[row], [token for token in draw.output_ids if 0 <= token < vocab], 1)
    return torch.from_numpy(counted)


def _lists(entries: Sequence[Sequence[tuple[int, float]]], vocab: int) -> TokenLists | None:
    """One list a row, ascending, what is named twice added up; None where no row has one."""
    merged: list[dict[int, float]] = []
    for row in entries:
        summed: dict[int, float] = {}
        for token, value in row:
            if 0 <= token < vocab:
                summed[token] = float(np.float32(summed.get(token, 0.0)) + np.float32(value))
        merged.append(dict(sorted(summed.items())))
    if not any(merged):
        return None
    starts = np.cumsum([0, *(len(row) for row in merged)], dtype=np.int32)
    tokens = np.array([token for row in merged for token in row], np.int32)
    values = np.array([value for row in merged for value in row.values()], np.float32)
    return TokenLists(torch.from_numpy(starts), torch.from_numpy(tokens), torch.from_numpy(values))


def _moved(rows: SamplingRows, device: torch.device) -> SamplingRows:
    def to(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(device, non_blocking=True)

    def lists(each: TokenLists | None) -> TokenLists | None:
        if each is None:
            return None
        starts, tokens, values = to(each.starts), to(each.tokens), to(each.values)
        assert starts is not None and tokens is not None and values is not None
        return TokenLists(starts, tokens, values)

    numbers, counts = to(rows.numbers), to(rows.counts)
    assert numbers is not None and counts is not None
    masks = (to(rows.allowed), to(rows.prompt_seen), to(rows.output_counts))
    return SamplingRows(numbers, counts, *masks, lists(rows.bias), lists(rows.banned))
