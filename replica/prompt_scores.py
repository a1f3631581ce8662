"""Log probabilities of a prompt's own tokens.

The token at position p is judged by the hidden state at p − 1, which therefore has to be in the same row: a chunk scores the
token that follows it (Row.score_next), and Row.score_from is 0 or beyond Row.start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from replica.contract.messages import TokenLogprobs
from replica.logprobs import token_logprobs
from replica.step import Row

ROWS_AT_ONCE = 64  # logits of so many positions exist at a time


def score_prompt(row: Row, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> tuple[TokenLogprobs | None, ...]:
    """One entry for each position that `row` scores, None for position 0. hidden [len(row.tokens), H].

    `logits_of` is that of `scored_logits`.
    """
    assert row.score_from is not None
    scores: list[TokenLogprobs | None] = [None] if row.score_from == 0 else []
    targets = list(row.tokens[max(row.score_from, 1) - row.start :])
    if row.score_next is not None:
        targets.append(row.score_next)
    for at, logits in enumerate(scored_logits(row.start, row.score_from, row.draw is not None, hidden, logits_of)):
        part = targets[at * ROWS_AT_ONCE : (at + 1) * ROWS_AT_ONCE]
        if part:
            scores += token_logprobs(logits[: len(part)].cpu(), part, [row.score_top] * len(part))
    return tuple(scores)


def scored_logits(start: int, score_from: int, draws: bool, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """What judges a row's scored tokens but the first of a prompt, at most ROWS_AT_ONCE at a time; all that other ranks do of scoring.

    A row that draws judges no token after it; of another the last state counts too, though at a prompt's very end nothing follows.
    `logits_of` maps states [n, H] to logits [n, V]; with several ranks it is a collective, so every rank computes these alike.
    """
    assert score_from == 0 or score_from > start
    states = hidden[max(score_from, 1) - 1 - start : -1 if draws else None]
    for at in range(0, states.shape[0], ROWS_AT_ONCE):
        yield logits_of(states[at : at + ROWS_AT_ONCE])
