"""One request's way through the simulation, as its client saw it."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.simulator.trace import TraceRequest
from replica.contract.messages import FinishReason
from router.ports import Delta

COVERED = (0.5, 0.9, 0.98)


@dataclass(slots=True)
class Promise:
    """What the router expected of an attempt when it sent it."""

    new_tokens: int
    sent_s: float
    quantiles_s: tuple[float, ...]  # of the time to first token from then on, at COVERED
    constant_s: float  # the median by one scale for all lengths that never learns: the baseline of the pinball loss


@dataclass(slots=True)
class Journey:
    """Times are virtual seconds. Tokens are kept only where somebody will compare them."""

    number: int
    request: TraceRequest
    router: int
    replica: str = ""
    promise: Promise | None = None
    first_s: float | None = None
    last_s: float | None = None
    received: int = 0
    cached_tokens: int = 0
    queue_time_s: float | None = None
    finishes: list[FinishReason] = field(default_factory=list)
    rejected: tuple[int, str] | None = None  # status, reason
    ended_s: float | None = None
    ends: int = 0
    is_cancelled: bool = False
    tokens: list[int] | None = None

    def hear(self, delta: Delta, now: float) -> None:
        if delta.token_ids:
            if self.first_s is None:
                self.first_s = now
            self.last_s = now
            self.received += len(delta.token_ids)
            if self.tokens is not None:
                self.tokens.extend(delta.token_ids)
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        if delta.queue_time_s is not None:
            self.queue_time_s = delta.queue_time_s
        if delta.finish is not None:
            self.finishes.append(delta.finish)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between its tokens; None for an answer of fewer than two."""
        if self.first_s is None or self.last_s is None or self.received < 2:
            return None
        return (self.last_s - self.first_s) / (self.received - 1)

    @property
    def is_complete(self) -> bool:
        return self.finishes == [FinishReason.LENGTH] and self.received == self.request.output_tokens
