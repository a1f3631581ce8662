"""Log probabilities of a prompt's own tokens.

The token at position p is judged by the hidden state at p − 1, which therefore has to be in the same row: scored chunks
overlap by one token (Row.score_from is 0 or beyond Row.start).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from replica.contract.messages import TokenLogprobs
from replica.logprobs import token_logprobs

ROWS_AT_ONCE = 64  # logits of so many positions exist at a time


def score_prompt(
    tokens: Sequence[int], start: int, score_from: int, top: int, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> tuple[TokenLogprobs | None, ...]:
    """One entry for each position score_from … of a row (replica.step.Row), None for position 0. hidden [len(tokens), H].

    `logits_of` maps states [n, H] to logits [n, V]; with several ranks it is a collective, so every rank scores alike.
    """
    assert score_from == 0 or score_from > start
    begin = max(score_from, 1)
    scores: list[TokenLogprobs | None] = [None] if score_from == 0 else []
    targets = [int(token) for token in tokens[begin - start :]]
    states = hidden[begin - 1 - start : -1]
    for at in range(0, len(targets), ROWS_AT_ONCE):
        part = targets[at : at + ROWS_AT_ONCE]
        logits = logits_of(states[at : at + ROWS_AT_ONCE]).cpu()
        scores += token_logprobs(logits, part, [top] * len(part))
    return tuple(scores)
