"""What a request asks of its logits before anything is drawn: penalties, biases, and tokens that may not come."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from replica.contract.messages import SamplingParams
from replica.step import Draw

Logits = npt.NDArray[np.float32]
PENALTY_LEAST = 1e-20  # smaller repetition penalties do as it does: dividing by them says the same, and overflows


def has_rules(draw: Draw) -> bool:
    """Whether apply_rules would change anything for this draw."""
    s = draw.sampling
    return (
        s.repetition_penalty != 1.0
        or s.presence_penalty != 0.0
        or s.frequency_penalty != 0.0
        or bool(s.logit_bias)
        or bool(s.bad_words)
        or s.allowed_token_ids is not None
        or draw.mask is not None
        or len(draw.output_ids) < s.min_tokens
    )


def apply_rules(logits: Logits, draw: Draw, eos_token_ids: frozenset[int]) -> None:
    """Change one row of logits [V] in place. Ids outside V are ignored.

    In vLLM's order: allowed ids and the mask, bad words and min_tokens (all −inf), biases, then penalties; so a penalty scales
    a biased logit. If bad words and min_tokens would leave nothing, they are lifted; what leaves nothing by itself raises ValueError.
    """
    _allow(logits, draw)
    banned = _inside(banned_now(draw, eos_token_ids), logits.size)
    if banned.size:
        before = logits[banned]
        logits[banned] = -np.inf
        if np.isneginf(logits.max()):
            logits[banned] = before
    bias = [(token, value) for token, value in draw.sampling.logit_bias if 0 <= token < logits.size]
    if bias:
        np.add.at(logits, [token for token, _ in bias], np.array([value for _, value in bias], np.float32))
    _penalize(logits, draw)


def _allow(logits: Logits, draw: Draw) -> None:
    """Only what allowed_token_ids and the mask both let pass."""
    ids, mask = draw.sampling.allowed_token_ids, draw.mask
    if ids is not None:
        allowed = _inside(ids, logits.size)
        kept = logits[allowed]
        logits.fill(-np.inf)
        logits[allowed] = kept
    if mask is not None:
        passing = mask.allowed(draw.output_ids)
        if passing.shape != logits.shape or passing.dtype != np.bool_:
            raise ValueError(f"the mask has {passing.shape} entries of {passing.dtype}, {logits.shape} of bool are expected")
        logits[~passing] = -np.inf
    if (ids is not None or mask is not None) and np.isneginf(logits.max()):
        raise ValueError("allowed_token_ids and the mask leave no token")


def banned_now(draw: Draw, eos_token_ids: frozenset[int]) -> list[int]:
    """Tokens that would complete a bad word, and, while min_tokens is not reached, all that would end the request."""
    sampling, output = draw.sampling, draw.output_ids
    banned = [word[-1] for word in sampling.bad_words if word and _ends_with(output, word[:-1])]
    if len(output) < sampling.min_tokens:
        banned += ending_ids(sampling, eos_token_ids)
    return banned


def ending_ids(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> list[int]:
    """All ids that end this request, the model's own first."""
    own = [] if sampling.ignore_eos else sorted(eos_token_ids)
    return [*own, *sampling.stop_token_ids]


def _penalize(logits: Logits, draw: Draw) -> None:
    """Repetition counts the prompt and the output; presence and frequency the output alone."""
    s = draw.sampling
    if s.repetition_penalty != 1.0:
        seen = np.concatenate((_inside(draw.prompt_ids, logits.size), _inside(draw.output_ids, logits.size)))
        values = logits[seen]  # one that occurs twice is read and written twice, with the same result
        penalty = max(s.repetition_penalty, PENALTY_LEAST)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if (s.presence_penalty != 0.0 or s.frequency_penalty != 0.0) and len(draw.output_ids):
        produced, counts = np.unique(_inside(draw.output_ids, logits.size), return_counts=True)
        logits[produced] -= (s.presence_penalty + s.frequency_penalty * counts).astype(np.float32)


def _inside(ids: Collection[int], vocab_size: int) -> npt.NDArray[np.int64]:
    array = np.fromiter(ids, np.int64, len(ids))
    return array[(array >= 0) & (array < vocab_size)]


def _ends_with(output: Sequence[int], prefix: Sequence[int]) -> bool:
    size = len(prefix)
    return size == 0 or (len(output) >= size and list(output[-size:]) == list(prefix))
