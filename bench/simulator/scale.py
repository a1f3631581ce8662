"""What the simulator, and with it the router, costs at scale: `python -m bench.simulator.scale --replicas 10 100 1000`.

Poisson arrivals of 256 tokens in and 32 out at the same rate per replica, so that the cost per event can be compared.
"""

from __future__ import annotations

import argparse
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

from bench.result import Metric, Result, write
from bench.simulator.score import score
from bench.simulator.setup import Setup
from bench.simulator.slo import Slo
from bench.simulator.trace import synthetic
from bench.simulator.world import Layout

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 32
RATE_PER_REPLICA = 10.0
GROWTH_MAX = 1.5
SECONDS_MAX, GIB_MAX = 300.0, 4.0


@dataclass(frozen=True, slots=True)
class Cost:
    replicas: int
    requests: int
    completed: int
    events: int
    cpu_s: float
    cpu_us_per_event: float
    memory_gib: float


def measure(replicas: int, requests: int) -> Cost:
    arrivals = synthetic(requests, prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS, rate_per_s=RATE_PER_REPLICA * replicas, seed=1)
    began_s = time.process_time()
    world = Setup(layout=Layout(replicas=replicas)).world()
    world.run(arrivals)
    cpu_s = time.process_time() - began_s
    figures = score(world, Slo())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return Cost(replicas, requests, figures["completed"], world.agenda.events, cpu_s, 1e6 * cpu_s / world.agenda.events, memory)


def metrics_of(costs: list[Cost]) -> tuple[Metric, ...]:
    found = []
    for cost in costs:
        name = f"{cost.requests} requests on {cost.replicas} replicas"
        if cost.requests == 100_000:
            found.append(Metric(f"{name}: CPU", round(cost.cpu_s, 1), "s", f"<= {SECONDS_MAX:g}", cost.cpu_s <= SECONDS_MAX))
            found.append(Metric(f"{name}: memory", round(cost.memory_gib, 2), "GiB", f"<= {GIB_MAX:g}", cost.memory_gib <= GIB_MAX))
        found.append(Metric(f"{name}: CPU per event", round(cost.cpu_us_per_event, 1), "us"))
    growth = costs[-1].cpu_us_per_event / costs[0].cpu_us_per_event
    name = f"CPU per event, {costs[-1].replicas} replicas against {costs[0].replicas}"
    return (*found, Metric(name, round(growth, 2), "times", f"<= {GROWTH_MAX:g}", growth <= GROWTH_MAX))


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU and memory of a simulation by the number of replicas, written to bench/results.")
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--requests", type=int, default=100_000, help="with 100 replicas and more; fewer with fewer")
    asked = parser.parse_args()
    costs = []
    for replicas in asked.replicas:
        requests = min(asked.requests, asked.requests * replicas // 100)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # memory of its own
            costs.append(pool.submit(measure, replicas, requests).result())
        print(costs[-1], flush=True)
    configuration = {"work": f"{PROMPT_TOKENS}/{OUTPUT_TOKENS}", "requests per replica and second": f"{RATE_PER_REPLICA:g}"}
    details: dict[str, object] = {"costs": [asdict(cost) for cost in costs]}
    print(write(Result("simulated-scale", configuration, metrics=metrics_of(costs), details=details)))


if __name__ == "__main__":
    main()
