"""A burst at a fresh replica: who is let in starts in time (ADM-01), in the simulator with the production router and engine.

160 prompts of 400 tokens within 30 ms, after twelve calm requests that waited for two steps at most. The engine begins with the
guess of its step time that every engine begins with; steps vary by 15 %, and take 1.3 times as long while the burst lasts.
"""

import math

import pytest

from bench.simulator.cost import Profile
from bench.simulator.engine_replica import EngineReplica
from bench.simulator.fault import Fault, FaultKind
from bench.simulator.trace import TraceRequest, own_keys
from bench.simulator.world import Layout, World
from replica.contract.messages import StepTimeCoefficients
from replica.step_time_fit import PRIOR
from router.config import RouterConfig
from router.policy.calibration import Calibration

SEEDS = 20
KEPT_MIN, SERVED_MIN = 19, 8
SLO_S = 2.0
BURST_S, SPREAD_S, REQUESTS, TOKENS = 4.0, 0.03, 160, 400
TWO_CORES = Profile(
    step_time=StepTimeCoefficients(a=0.0097, b=0.0003, c=0.0003, d=2.2e-6, e=8.6e-9),
    max_num_batched_tokens=512,
    max_num_seqs=64,
    block_size=16,
    pool_blocks=1456,
    max_model_len=8192,
    step_slo_s=0.2,
)
SLOW = Fault(at_s=BURST_S, kind=FaultKind.SLOW, amount=1.3, lasts_s=30.0)


def one(number: int, at_s: float, output_tokens: int) -> TraceRequest:
    return TraceRequest(at_s, TOKENS, output_tokens, own_keys(number, TOKENS, TWO_CORES.block_size))


def waits_s(seed: int) -> list[float]:
    """Queue times of those of the burst that were let in, ascending."""
    calm = [one(number, 0.62 * (number // 4), 16) for number in range(12)]
    burst = [one(100 + number, BURST_S + SPREAD_S * number / REQUESTS, 32) for number in range(REQUESTS)]
    world = World(
        RouterConfig(queue_time_slo_s=SLO_S),
        Layout(replicas=1, seed=seed),
        lambda index, epoch: EngineReplica(TWO_CORES, seed=7 * seed + epoch, told=PRIOR, noise=0.15),
    )
    world.run([*calm, *burst], [SLOW])
    served = [journey for journey in world.journeys[len(calm) :] if journey.rejected is None]
    assert all(journey.is_complete for journey in served)
    return sorted(journey.queue_time_s for journey in served if journey.queue_time_s is not None)


def kept(seeds: int = SEEDS) -> int:
    """Bursts of which 95 % of those let in started in time."""
    count = 0
    for seed in range(seeds):
        waits = waits_s(seed)
        assert len(waits) >= SERVED_MIN
        count += waits[math.ceil(0.95 * len(waits)) - 1] <= SLO_S
    return count


def test_who_is_let_in_starts_in_time() -> None:
    assert kept() >= KEPT_MIN


def test_if_short_waits_told_of_long_ones_it_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    push = Calibration._push
    monkeypatch.setattr(Calibration, "_push", lambda self, residual, *, is_long: push(self, residual))
    assert kept() < KEPT_MIN
