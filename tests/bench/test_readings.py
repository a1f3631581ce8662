"""A simulated twin costs what its replica did: in the mean, in spread, and as it wandered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.drills.readings import Reading, read, twin
from replica.contract.messages import StepTimeCoefficients

PAGE = """\
# TYPE rantang:replica_step_time_seconds gauge
rantang:replica_step_time_seconds{replica="r0",coefficient="a"} 0.01
rantang:replica_step_time_seconds{replica="r0",coefficient="b"} 0.0006
rantang:replica_step_time_seconds{replica="r0",coefficient="c"} 0.0005
rantang:replica_step_time_seconds{replica="r0",coefficient="d"} 0.0
rantang:replica_step_time_seconds{replica="r0",coefficient="e"} 0.0
rantang:replica_step_time_seconds{replica="r1",coefficient="a"} 9.0
# TYPE rantang:replica_step_time_spread gauge
rantang:replica_step_time_spread{replica="r0"} 0.16
# TYPE rantang:replica_busy_seconds counter
rantang:replica_busy_seconds_total{replica="r0"} 12.0
# TYPE rantang:replica_foreseen_seconds counter
rantang:replica_foreseen_seconds_total{replica="r0"} 11.0
# TYPE rantang:replica_limit gauge
rantang:replica_limit{replica="r0",limit="max_num_batched_tokens"} 512
rantang:replica_limit{replica="r0",limit="max_num_seqs"} 32
rantang:replica_limit{replica="r0",limit="num_blocks"} 2000
rantang:replica_limit{replica="r0",limit="block_size"} 16
rantang:replica_limit{replica="r0",limit="max_model_len"} 8192
rantang:replica_limit{replica="r0",limit="step_slo_s"} 0.25
"""


def test_the_page_is_read_of_the_first_replica() -> None:
    one = read(PAGE, 3.0)
    assert one.profile.step_time == StepTimeCoefficients(0.01, 0.0006, 0.0005, 0.0)
    assert (one.profile.max_num_batched_tokens, one.profile.pool_blocks, one.profile.step_slo_s) == (512, 2000, 0.25)
    assert (one.at_s, one.spread, one.busy_s, one.foreseen_s) == (3.0, 0.16, 12.0, 11.0)
    with pytest.raises(ValueError, match="nothing of a replica"):
        read("", 0.0)


def later(one: Reading, at_s: float, factor: float, busy_s: float, foreseen_s: float, spread: float = 0.16) -> Reading:
    k = one.profile.step_time
    times = StepTimeCoefficients(k.a * factor, k.b * factor, k.c * factor, k.d * factor, k.e * factor)
    return replace(one, at_s=at_s, profile=replace(one.profile, step_time=times), busy_s=busy_s, foreseen_s=foreseen_s, spread=spread)


def test_its_step_time_is_the_mean_by_what_steps_took_more_than_foreseen() -> None:
    first = read(PAGE, 0.0)
    one = twin([first, later(first, 5.0, 3.0, 23.0, 21.0, spread=0.48)], 100)
    assert one.profile.step_time.b == pytest.approx(2.0 * 0.0006 * 1.1)
    assert one.noise == pytest.approx(0.2)


def test_each_stretch_is_as_slow_as_was_fitted_in_it() -> None:
    first = read(PAGE, 0.0)
    one = twin([first, later(first, 5.0, 1.0, 13.0, 12.0), later(first, 15.0, 4.0, 14.0, 13.0)], 100)
    assert [round(fault.amount, 3) for fault in one.drift] == [0.5, 2.0]
    assert [fault.at_s for fault in one.drift] == [0.0, 5.0]
    assert all(fault.at_s + fault.lasts_s < end_s for fault, end_s in zip(one.drift, (5.0, 15.0), strict=True)), (
        "else its end undoes the next"
    )


def test_a_replica_that_did_nothing_has_no_bias() -> None:
    first = read(PAGE, 0.0)
    assert twin([first, replace(first, at_s=5.0)], 100).profile.step_time == first.profile.step_time
