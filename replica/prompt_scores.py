"""Log probabilities of a prompt's own tokens, chunk by chunk.

The token at position p is judged by the hidden state at p − 1. For a chunk's first token that state belonged to the chunk
before, so the last state of each scored chunk is kept until the next one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from replica.contract.messages import TokenLogprobs
from replica.logprobs import token_logprobs
from replica.step import Row

ROWS_AT_ONCE = 64  # logits of so many positions exist at a time
KEPT_MAX = 1024  # requests; the oldest is forgotten beyond it

Scores = tuple[TokenLogprobs | None, ...]


class PromptScorer:
    """`logits` maps hidden states [n, H] to logits [n, V]; with several ranks it is a collective, so every rank scores alike."""

    def __init__(self, logits: Callable[[Tensor], Tensor]) -> None:
        self._logits = logits
        self._last: dict[int, tuple[int, Tensor]] = {}  # request → (position, its hidden state)

    def score(self, row: Row, hidden: Tensor) -> tuple[Scores, str]:
        """Scores of positions score_from … of the row (None for position 0), or why there are none. hidden [len(tokens), H]."""
        assert row.score_from is not None and row.score_from >= row.start
        end = row.start + len(row.tokens)
        begin = max(row.score_from, 1)
        kept_position, kept = self._last.pop(row.request, (-1, hidden[:0]))
        self._keep(row.request, end - 1, hidden[-1:].clone())
        first: Scores = (None,) if row.score_from == 0 else ()
        if begin >= end:
            return first, ""
        if begin > row.start:
            states = hidden[begin - 1 - row.start : end - 1 - row.start]
        elif kept_position == begin - 1:
            states = torch.cat((kept, hidden[: end - 1 - row.start]))
        else:
            return (), f"prompt logprobs: the state before position {begin} is not at hand"
        targets = [int(token) for token in row.tokens[begin - row.start :]]
        scores: list[TokenLogprobs | None] = list(first)
        for at in range(0, len(targets), ROWS_AT_ONCE):
            part = targets[at : at + ROWS_AT_ONCE]
            logits = self._logits(states[at : at + ROWS_AT_ONCE]).cpu()
            scores += token_logprobs(logits, part, [min(row.score_top, logits.shape[1])] * len(part))
        return tuple(scores), ""

    def _keep(self, request: int, position: int, state: Tensor) -> None:
        while len(self._last) >= KEPT_MAX:
            del self._last[next(iter(self._last))]
        self._last[request] = (position, state)
