"""The burst at a fresh replica: the same for one seed, and enough are served."""

import pytest

from bench.simulator import burst
from router.policy.calibration import Calibration

SEEDS = 20


def bursts() -> list[burst.Burst]:
    return [burst.run(seed, noise=0.15, slowness=1.3) for seed in range(SEEDS)]


def test_who_is_let_in_at_a_fresh_replica_starts_in_time() -> None:
    """ADM-01: 19 bursts of 20, though steps vary and take 1.3 times as long as ever before."""
    assert burst.report(bursts(), {}).holds


def test_without_the_margin_of_the_prediction_it_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calibration, "_residual", lambda self, quantile: 0.0)
    assert not burst.report(bursts(), {}).holds


def test_a_burst_is_its_seed_and_serves_some() -> None:
    one = burst.run(1, noise=0.15, slowness=1.3)
    assert one == burst.run(1, noise=0.15, slowness=1.3)
    assert one != burst.run(2, noise=0.15, slowness=1.3)
    assert burst.SERVED_MIN <= len(one.queue_times_s) < burst.REQUESTS / 2


def test_a_promise_that_is_broken_too_often_is_said() -> None:
    late = burst.Burst((0.1, 2 * burst.SLO_S))
    in_time = burst.Burst((0.1,) * burst.SERVED_MIN)
    assert burst.report([in_time] * 20, {}).holds
    assert not burst.report([in_time, late], {}).holds
