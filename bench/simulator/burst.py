"""A burst at a fresh replica: do those who are let in start in time (ADM-01)? `python -m bench.simulator.burst`.

160 prompts of 400 tokens within 30 ms, after twelve calm requests that waited for a step or two. The engine is the real one with a
runner that costs as two cores do; it begins with the guess of its step time that every engine begins with, steps vary at random,
and they take longer while the burst lasts. Bursts of one seed are the same, token for token.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from bench import result
from bench.quantiles import quantile
from bench.result import Result
from bench.simulator.cost import Profile
from bench.simulator.engine_replica import EngineReplica
from bench.simulator.fault import Fault, FaultKind
from bench.simulator.trace import TraceRequest, own_keys
from bench.simulator.world import Layout, World
from replica.contract.messages import StepTimeCoefficients
from replica.step_time_fit import PRIOR
from router.config import RouterConfig

SLO_S = 2.0
KEPT_MIN, SERVED_MIN = 0.95, 8
CALM, CALM_AT_ONCE, CALM_EVERY_S, CALM_TOKENS = 12, 4, 0.62, 16
BURST_S, SPREAD_S, REQUESTS, PROMPT_TOKENS, TOKENS = 4.0, 0.03, 160, 400, 32
TWO_CORES = Profile(
    step_time=StepTimeCoefficients(a=0.0097, b=0.0003, c=0.0003, d=2.2e-6, e=8.6e-9),
    max_num_batched_tokens=512,
    max_num_seqs=64,
    block_size=16,
    pool_blocks=1456,
    max_model_len=8192,
    step_slo_s=0.2,
)


@dataclass(frozen=True, slots=True)
class Burst:
    queue_times_s: tuple[float, ...]  # of those that were let in

    @property
    def p95_s(self) -> float:
        return quantile(self.queue_times_s, 0.95) or 0.0


def run(seed: int, *, noise: float, slowness: float) -> Burst:
    """`noise`: standard deviation of a step's duration, relative; `slowness`: of the steps from the burst on."""
    calm = [_request(i, CALM_EVERY_S * (i // CALM_AT_ONCE), CALM_TOKENS) for i in range(CALM)]
    burst = [_request(CALM + i, BURST_S + SPREAD_S * i / REQUESTS, TOKENS) for i in range(REQUESTS)]
    world = World(
        RouterConfig(queue_time_slo_s=SLO_S),
        Layout(replicas=1, seed=seed),
        lambda index, epoch: EngineReplica(TWO_CORES, seed=7 * seed + epoch, told=PRIOR, noise=noise),
    )
    world.run([*calm, *burst], [Fault(at_s=BURST_S, kind=FaultKind.SLOW, amount=slowness, lasts_s=60.0)])
    served = [journey for journey in world.journeys[CALM:] if journey.is_complete]
    return Burst(tuple(journey.queue_time_s for journey in served if journey.queue_time_s is not None))


def _request(number: int, at_s: float, output_tokens: int) -> TraceRequest:
    return TraceRequest(at_s, PROMPT_TOKENS, output_tokens, own_keys(number, PROMPT_TOKENS, TWO_CORES.block_size))


def report(bursts: list[Burst], configuration: dict[str, str]) -> Result:
    times_s = [burst.p95_s for burst in bursts]
    kept = sum(time_s <= SLO_S for time_s in times_s)
    metrics = (
        result.at_least("bursts whose p95 of queue time kept the SLO", float(kept), KEPT_MIN * len(bursts), f"of {len(bursts)}"),
        result.plain("queue_time_p95.worst", max(times_s), "s"),
        result.at_least("served.least", float(min(len(burst.queue_times_s) for burst in bursts)), SERVED_MIN, "requests"),
    )
    return Result("simulated-burst", configuration, metrics=metrics)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--noise", type=float, default=0.15)
    parser.add_argument("--slowness", type=float, default=1.3)
    asked = parser.parse_args()
    bursts = [run(seed, noise=asked.noise, slowness=asked.slowness) for seed in range(asked.seeds)]
    outcome = report(bursts, {"noise": f"{asked.noise:g}", "slowness": f"{asked.slowness:g}"})
    result.show(outcome)
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
