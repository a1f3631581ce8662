"""What was expected of a request when it was sent to a replica, and how often that held."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import msgspec

LENGTHS = (128, 512, 2048)  # upper ends of the buckets, tokens to prefill
_QUANTILES = (0.5, 0.9)  # beside admission's own


class Prediction(msgspec.Struct, frozen=True, gc=False):
    """Seconds from the dispatch to the replica, each by the quantiles of `Coverage`."""

    queue_times_s: tuple[float, ...]
    ttfts_s: tuple[float, ...]
    new_tokens: int
    cached_tokens: int

    def after(self, queued_s: float) -> Prediction:
        """From the arrival at the router, so long before."""
        return Prediction(
            tuple([queued_s + one for one in self.queue_times_s]),
            tuple([queued_s + one for one in self.ttfts_s]),
            self.new_tokens,
            self.cached_tokens,
        )

    @property
    def queue_time_s(self) -> float:
        """As likely too long as too short."""
        return self.queue_times_s[0]

    @property
    def ttft_s(self) -> float:
        return self.ttfts_s[0]


@dataclass(slots=True)
class Count:
    within: int = 0
    total: int = 0


class Coverage:
    """How many stayed within each quantile: of `what` ("queue_time" or "ttft"), by length to prefill."""

    def __init__(self, admission_quantile: float) -> None:
        self.quantiles = (*_QUANTILES, admission_quantile)
        self.counts: dict[tuple[str, str, float], Count] = {}

    def observe(self, what: str, new_tokens: int, predicted_s: tuple[float, ...], actual_s: float) -> list[tuple[float, bool]]:
        """Each quantile, and whether the actual time stayed within it."""
        length = length_name(new_tokens)
        promises = [(quantile, actual_s <= bound_s) for quantile, bound_s in zip(self.quantiles, predicted_s, strict=True)]
        for quantile, within in promises:
            count = self.counts.get((what, length, quantile))
            if count is None:
                count = self.counts[what, length, quantile] = Count()
            count.total += 1
            count.within += within
        return promises


def length_name(new_tokens: int) -> str:
    bucket = bisect_left(LENGTHS, new_tokens)
    return f"<={LENGTHS[bucket]}" if bucket < len(LENGTHS) else f">{LENGTHS[-1]}"
