"""Log probabilities of a prompt's own tokens.

The token at position p is judged by the hidden state at p − 1, which therefore has to be in the same row: scored chunks
overlap by one token (Row.score_from is 0 or beyond Row.start).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from replica.contract.messages import TokenLogprobs
from replica.logprobs import token_logprobs

ROWS_AT_ONCE = 64  # logits of so many positions exist at a time


def score_prompt(
    tokens: Sequence[int], start: int, score_from: int, top: int, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> tuple[TokenLogprobs | None, ...]:
    """One entry for each position score_from … of a row (replica.step.Row), None for position 0. hidden [len(tokens), H].

    `logits_of` is that of `scored_logits`.
    """
    begin = max(score_from, 1)
    scores: list[TokenLogprobs | None] = [None] if score_from == 0 else []
    targets = [int(token) for token in tokens[begin - start :]]
    for at, logits in enumerate(scored_logits(start, score_from, hidden, logits_of)):
        part = targets[at * ROWS_AT_ONCE : (at + 1) * ROWS_AT_ONCE]
        scores += token_logprobs(logits.cpu(), part, [top] * len(part))
    return tuple(scores)


def scored_logits(start: int, score_from: int, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """What judges a row's scored tokens but the first of a prompt, at most ROWS_AT_ONCE at a time; all that other ranks do of scoring.

    `logits_of` maps states [n, H] to logits [n, V]; with several ranks it is a collective, so every rank computes these alike.
    """
    assert score_from == 0 or score_from > start
    states = hidden[max(score_from, 1) - 1 - start : -1]
    for at in range(0, states.shape[0], ROWS_AT_ONCE):
        yield logits_of(states[at : at + ROWS_AT_ONCE])
