"""How requests leave: the one door, and what waits in front of it (cancels, deadlines)."""

from __future__ import annotations

import heapq

from replica.contract.messages import FinishReason, TokenLogprobs
from replica.ledger import Ledger
from replica.outbox import Outbox
from replica.request import Request, State
from replica.roster import Roster

_ENDED_KEPT = 64  # deadlines of ended requests that are not worth a sweep
_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)  # with a token drawn here: who came with its last token has been learned from


class Departures:
    """`end` is the only way out: slot and blocks come back, the ledger closes, the client hears it, in one call."""

    def __init__(self, roster: Roster, ledger: Ledger, outbox: Outbox) -> None:
        self.outbox = outbox
        self._roster = roster
        self._ledger = ledger
        self._cancelled: list[Request] = []
        self._deadlines: list[tuple[float, int, Request]] = []

    def end(
        self,
        request: Request,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        logprobs: TokenLogprobs | None = None,
        error: str = "",
    ) -> None:
        """`request` ends with its last tokens. Never while a step runs: its pages may be being written."""
        self._roster.release(request, State.FINISHED)
        self._ledger.close(request, reason)
        if token_ids and reason in _BY_ITSELF:
            self._roster.growth.learn(len(request.output_ids))
        self.outbox.tokens(request, token_ids, logprobs=logprobs, finish=reason, error=error)

    def watch(self, request: Request) -> None:
        """A request has entered: mind its deadline; if an earlier attempt brought it to its end already, it ends here."""
        if request.terms.deadline_s is not None:
            self._note_deadline(request, request.terms.deadline_s)
        if request.output_ids:
            reason = ending_of(request, request.output_ids[-1])
            if reason is not None:
                self.end(request, reason)

    def _note_deadline(self, request: Request, deadline_s: float) -> None:
        """Those of the ended go when they are the majority: each would keep a whole request until its time has come."""
        if len(self._deadlines) > 2 * len(self._ledger) + _ENDED_KEPT:
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is not State.FINISHED]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline_s, request.number, request))

    def cancel(self, request: Request, *, defer: bool) -> None:
        """`defer`: a step runs; the cancel takes effect when it has ended."""
        if defer:
            self._cancelled.append(request)
        else:
            self.end(request, FinishReason.ABORT)

    def drain_cancels(self) -> None:
        """The step has ended: now the cancels that came meanwhile, before anything of the step counts for them."""
        for request in self._cancelled:
            if request.state is not State.FINISHED:
                self.end(request, FinishReason.ABORT)
        self._cancelled.clear()

    def expire(self, now_s: float) -> None:
        """End whoever is past its deadline and has no token yet."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            request = heapq.heappop(self._deadlines)[2]
            if request.state is not State.FINISHED and not request.output_ids:
                self.end(request, FinishReason.TIMEOUT)


def ending_of(request: Request, token: int) -> FinishReason | None:
    """Whether `token`, the last of its output, ends the request. A stop id counts once min_tokens are reached."""
    if token in request.terms.stop_ids and len(request.output_ids) >= request.draw.sampling.min_tokens:
        return FinishReason.STOP
    if len(request.tokens) >= request.tokens_max:
        return FinishReason.LENGTH
    return None
