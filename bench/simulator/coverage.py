"""How often the predicted quantiles of the time to first token hold, by length to prefill: `python -m bench.simulator.coverage`.

A trace of conversations has few short prompts. Here all lengths are as frequent: each request's is drawn from one of the
buckets in turn, evenly, at about two thirds of what four replicas of the default set-up can do; nobody is refused.
"""

from __future__ import annotations

import argparse
from random import Random

from bench.result import Result, write
from bench.simulator.score import LENGTHS
from bench.simulator.setup import Setup
from bench.simulator.slo import Slo
from bench.simulator.tables import covered
from bench.simulator.trace import TraceRequest, own_keys

LONGEST = 8192
RATE_PER_S = 16.0


def every_length(count: int, *, rate_per_s: float = RATE_PER_S, seed: int) -> tuple[TraceRequest, ...]:
    """Poisson arrivals, no prefixes, 16 to 160 tokens out."""
    random = Random(seed)
    ends = (16, *LENGTHS, LONGEST)
    now = 0.0
    requests: list[TraceRequest] = []
    for number in range(count):
        now += random.expovariate(rate_per_s)
        bucket = number % (len(ends) - 1)
        prompt = random.randint(ends[bucket] + 1, ends[bucket + 1])
        requests.append(TraceRequest(now, prompt, random.randint(16, 160), own_keys(number, prompt)))
    return tuple(requests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    row = Setup().run(every_length(asked.requests, seed=asked.seed), Slo())
    configuration = {"replicas": str(Setup().layout.replicas), "requests": str(asked.requests), "requests per second": f"{RATE_PER_S:g}"}
    outcome = Result("simulated-coverage", configuration, metrics=tuple(covered("every length", [row])), details={"rows": [row]})
    for metric in outcome.metrics:
        print(f"{metric.name}: {metric.value} {metric.unit} ({metric.bound})", "" if metric.holds is None else metric.holds)
    print(write(outcome))
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
