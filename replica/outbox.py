"""What the engine has to tell since it was last asked: token deltas by owner."""

from __future__ import annotations

from collections.abc import Sequence

from replica.contract.messages import FinishReason, TokenDelta, TokenLogprobs
from replica.request import Request


class Outbox:
    """The first delta of a request carries what admission learns from, the last one its end; none follows."""

    def __init__(self) -> None:
        self._deltas: list[tuple[int, TokenDelta]] = []

    def __len__(self) -> int:
        return len(self._deltas)

    def tokens(
        self,
        request: Request,
        token_ids: tuple[int, ...],
        *,
        logprobs: TokenLogprobs | None = None,
        finish: FinishReason | None = None,
        error: str = "",
    ) -> None:
        """`token_ids` were drawn for `request`; `finish` is set if it has ended by it."""
        terms = request.terms
        history = request.history
        if history.first_delta_sent and logprobs is None and finish is None:
            self._deltas.append((terms.owner, TokenDelta(terms.attempt, token_ids)))
            return
        stop_id = token_ids[-1] if finish is FinishReason.STOP and token_ids else None
        logprob_entries = () if logprobs is None else (logprobs,)
        if history.first_delta_sent:
            delta = TokenDelta(terms.attempt, token_ids, logprob_entries, finish=finish, stop_id=stop_id, error=error)
        else:
            started = history.first_scheduled_s
            scores: Sequence[TokenLogprobs | None] = request.scoring.scores if request.scoring is not None else ()
            delta = TokenDelta(
                terms.attempt,
                token_ids,
                logprob_entries,
                prompt_logprobs=tuple(scores) if len(scores) == terms.prompt_length else (),
                cached_tokens=None if started is None else history.cached_tokens,
                waited_s=None if started is None else started - terms.arrival_s,
                finish=finish,
                stop_id=stop_id,
                error=error,
            )
            history.first_delta_sent = True
        self._deltas.append((terms.owner, delta))

    def take(self) -> tuple[tuple[int, TokenDelta], ...]:
        deltas = tuple(self._deltas)
        self._deltas.clear()
        return deltas
