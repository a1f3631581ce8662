"""When requests are due: seconds from the start, ascending, the same for the same seed."""

from __future__ import annotations

import itertools
import random

from bench.load import Arrivals, Load
from bench.workload import Workload


def gamma(rate_per_s: float, count: int, seed: int, shape: float) -> tuple[float, ...]:
    """`count` arrivals with gamma-distributed gaps: shape 1 is a Poisson process, below it they come in bursts."""
    if rate_per_s <= 0:
        raise ValueError(f"rate must be positive, got {rate_per_s}")
    if shape <= 0:
        raise ValueError(f"burstiness must be positive, got {shape}")
    draw = random.Random(seed)
    return tuple(itertools.accumulate(draw.gammavariate(shape, 1 / (rate_per_s * shape)) for _ in range(count)))


def poisson(rate_per_s: float, count: int, seed: int) -> tuple[float, ...]:
    """`count` arrivals of a Poisson process."""
    return gamma(rate_per_s, count, seed, 1.0)


def evenly(rate_per_s: float, count: int) -> tuple[float, ...]:
    """`count` arrivals, 1 / rate apart, the first at once."""
    if rate_per_s <= 0:
        raise ValueError(f"rate must be positive, got {rate_per_s}")
    return tuple(i / rate_per_s for i in range(count))


def check_arrivals(workload: Workload, load: Load) -> None:
    """Raises ValueError for requests that no rate can be given to: the workload's own pattern has no length to be stretched."""
    own = load.rate_per_s is not None and load.arrivals is Arrivals.WORKLOAD
    if own and workload.rate_per_s is None and len(workload) > 1:
        raise ValueError(
            f"the requests of {workload.name} are all due at once: their times cannot be stretched to a rate;"
            " `run --arrivals poisson` (or gamma, even) draws others"
        )


def due_times(workload: Workload, load: Load) -> tuple[float, ...]:
    """When each call of the workload is due under an open load. The workload's own pattern keeps its shape at every rate."""
    assert load.streams is None, "a closed loop has no times"
    if load.arrivals is not Arrivals.WORKLOAD:
        assert load.rate_per_s is not None
        if load.arrivals is Arrivals.EVEN:
            return evenly(load.rate_per_s, len(workload))
        return gamma(load.rate_per_s, len(workload), workload.seed, load.burstiness if load.arrivals is Arrivals.GAMMA else 1.0)
    stretch = 1 / load.speed
    if load.rate_per_s is not None and workload.rate_per_s is not None:
        stretch = workload.rate_per_s / load.rate_per_s
    return tuple(call.due_s * stretch for call in workload)


def arrivals_s(workload: Workload, load: Load) -> float:
    """Until the last request is due. 0 in a closed loop, which goes at the server's pace."""
    return 0.0 if load.streams is not None or not len(workload) else due_times(workload, load)[-1]
