"""When requests are due: seconds from the start, ascending, the same for the same seed."""

from __future__ import annotations

import random


def poisson(rate_per_s: float, count: int, seed: int) -> tuple[float, ...]:
    """`count` arrivals of a Poisson process."""
    if rate_per_s <= 0:
        raise ValueError(f"rate must be positive, got {rate_per_s}")
    draw = random.Random(seed)
    now_s = 0.0
    times: list[float] = []
    for _ in range(count):
        now_s += draw.expovariate(rate_per_s)
        times.append(now_s)
    return tuple(times)


def evenly(rate_per_s: float, count: int) -> tuple[float, ...]:
    """`count` arrivals, 1 / rate apart, the first at once."""
    if rate_per_s <= 0:
        raise ValueError(f"rate must be positive, got {rate_per_s}")
    return tuple(i / rate_per_s for i in range(count))
