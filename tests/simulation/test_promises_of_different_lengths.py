"""A promise that grows with the prompt: the long have time, and do not use it up for those who have none."""

from random import Random

import pytest

from bench.simulator.cost import Profile
from bench.simulator.setup import Setup
from bench.simulator.slo import Slo
from bench.simulator.trace import TraceRequest, own_keys
from bench.simulator.world import Layout
from router.config import RouterConfig
from router.policy.standing import Standing

SHORT, LONG = 500, 20_000
SLO = Slo(1.0, 2 / 20_000)


def overload() -> tuple[TraceRequest, ...]:
    """One in five is long: 44,000 tokens a second, for replicas that do 30,000 together."""
    draw, now, found = Random(4), 0.0, []
    for number in range(500):
        now += draw.expovariate(10.0)
        tokens = LONG if draw.random() < 0.2 else SHORT
        found.append(TraceRequest(now, tokens, 20, own_keys(number, tokens)))
    return tuple(found)


def run() -> tuple[float, float, float]:
    """Goodput, and what was refused of the shortest and of the longest fifth."""
    router = RouterConfig(queue_depth_max=10_000, queue_tokens_max=1_000_000_000)
    setup = Setup(layout=Layout(replicas=2), profile=Profile(step_slo_s=0.08), router=router, admission=True)
    figures = setup.run(overload(), SLO)
    fifths = figures["shed_by_length_fifth"]
    return figures["goodput_fraction"], fifths[0], fifths[-1]


def test_the_long_leave_the_replicas_queues_to_the_short(monkeypatch: pytest.MonkeyPatch) -> None:
    goodput, short, long = run()
    assert goodput > 0.75
    assert short < 0.2
    assert long < 0.4, "and are served as well"
    monkeypatch.setattr(Standing, "asks", lambda self, *rest: None)
    without, short, _ = run()
    assert without < goodput - 0.15, "the control: each fills the queues as deep as its own promise"
    assert short > 0.3
