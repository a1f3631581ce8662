"""How a workload is offered: closed loop, a rate, or the workload's own times."""

from __future__ import annotations

import enum
from dataclasses import dataclass

STREAMS_MAX = 200_000  # as many as a workload may have requests: more would have none to send
BURST_RATE_PER_S = 10_000.0  # what is offered at this rate or above is due all at once


class Arrivals(enum.StrEnum):
    WORKLOAD = "workload"  # the workload's own times, stretched or squeezed to the rate
    POISSON = "poisson"
    GAMMA = "gamma"
    EVEN = "even"

    @classmethod
    def _missing_(cls, value: object) -> Arrivals:
        raise ValueError(f"{value!r} is not a valid Arrivals; there are {', '.join(cls)}")


@dataclass(frozen=True, slots=True)
class Load:
    """`streams`: a closed loop of so many clients. Else open: `rate_per_s`, or the workload's own times, `speed` times as fast."""

    streams: int | None = None
    rate_per_s: float | None = None
    arrivals: Arrivals = Arrivals.WORKLOAD
    burstiness: float = 1.0  # GAMMA: the shape; 1 is Poisson, smaller comes in bursts
    speed: float = 1.0
    obey_retry_after: bool = False
    new_connections: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be offered."""
        if self.streams is not None and self.rate_per_s is not None:
            raise ValueError("streams make a closed loop and a rate an open one: give one of them")
        if self.streams is not None and self.streams > STREAMS_MAX:
            raise ValueError(f"streams must be at most {STREAMS_MAX:,}, got {self.streams:,}")
        for name in ("streams", "rate_per_s", "burstiness", "speed"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive, got {value}")
        if self.arrivals is not Arrivals.WORKLOAD and self.rate_per_s is None:
            raise ValueError(f"{self.arrivals} arrivals need a rate")

    def over(self, requests: int) -> str:
        """In words, for so many requests: of more streams than those only so many ever run."""
        few = self.streams is not None and self.streams > requests
        return f"{self.description} (at most {requests} at a time)" if few else self.description

    @property
    def description(self) -> str:
        if self.streams is not None:
            return f"closed loop, {self.streams} stream{'s' * (self.streams > 1)}"
        if self.rate_per_s is None:
            return "the workload's own times" + (f", {self.speed:g} times as fast" if self.speed != 1 else "")
        if self.rate_per_s >= BURST_RATE_PER_S:
            return "burst"
        return f"{self.rate_per_s:g} req/s" + ("" if self.arrivals is Arrivals.WORKLOAD else f", {self.arrivals}")
