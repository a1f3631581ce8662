"""All requests that have not ended, by who sent them; and how the others ended. Every count is derived from here."""

from __future__ import annotations

from collections import Counter

from replica.contract.messages import FinishReason
from replica.request import Request


class Ledger:
    """accepted = ended, by reason + in flight, always."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], Request] = {}  # (owner, attempt): two routers may draw the same number
        self._accepted = 0
        self._ended: Counter[FinishReason] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def accepted(self) -> int:
        return self._accepted

    def ended(self, reason: FinishReason) -> int:
        return self._ended[reason]

    def find(self, owner: int, attempt: int) -> Request | None:
        return self._open.get((owner, attempt))

    def of_owner(self, owner: int) -> list[Request]:
        return [request for (sender, _), request in self._open.items() if sender == owner]

    def open(self, request: Request) -> None:
        self._accepted += 1
        self._open[(request.terms.owner, request.terms.attempt)] = request

    def close(self, request: Request, reason: FinishReason) -> None:
        del self._open[(request.terms.owner, request.terms.attempt)]
        self._ended[reason] += 1

    def requests(self) -> list[Request]:
        return list(self._open.values())

    def check(self) -> None:
        assert self._accepted == self._ended.total() + len(self._open), "a request was lost or ended twice"
