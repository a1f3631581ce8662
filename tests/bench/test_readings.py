"""A simulated twin costs what its replica did, as that wandered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.drills.readings import Reading, read, twin
from bench.simulator.cost import scaled
from replica.contract.messages import StepTimeCoefficients

K = StepTimeCoefficients(0.01, 0.0006, 0.0005, 0.0)
PAGE = """\
# TYPE rantang:replica_step_time_seconds gauge
rantang:replica_step_time_seconds{replica="r0",coefficient="a"} 0.01
rantang:replica_step_time_seconds{replica="r0",coefficient="b"} 0.0006
rantang:replica_step_time_seconds{replica="r0",coefficient="c"} 0.0005
rantang:replica_step_time_seconds{replica="r0",coefficient="d"} 0.0
rantang:replica_step_time_seconds{replica="r0",coefficient="e"} 0.0
rantang:replica_step_time_seconds{replica="r1",coefficient="a"} 9.0
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
    assert one.profile.step_time == K
    assert (one.profile.max_num_batched_tokens, one.profile.pool_blocks, one.profile.step_slo_s) == (512, 2000, 0.25)
    assert (one.at_s, one.busy_s, one.foreseen_s) == (3.0, 12.0, 11.0)
    with pytest.raises(ValueError, match="nothing of a replica"):
        read("", 0.0)


def later(one: Reading, at_s: float, factor: float, busy_s: float, foreseen_s: float) -> Reading:
    return replace(one, at_s=at_s, profile=replace(one.profile, step_time=scaled(K, factor)), busy_s=busy_s, foreseen_s=foreseen_s)


def test_every_other_stretch_is_told_as_it_was_fitted_before_and_by_how_it_went() -> None:
    first = read(PAGE, 0.0)
    readings = [first, later(first, 1.0, 3.0, 14.0, 12.0), later(first, 2.0, 1.5, 99.0, 12.5), later(first, 3.0, 9.0, 100.0, 14.5)]
    one = twin(readings)
    assert one.course.starts_s == (0.0, 2.0)
    assert [k.b for k in one.course.step_times] == pytest.approx([0.0006 * 2.0, 0.0006 * 1.5 * 0.5])
    assert one.course.at(1.9) == one.course.step_times[0], "the second that nobody tells of is like the one before"
    assert one.profile.step_time == K, "what the replica believed at first"


def test_a_replica_that_did_nothing_costs_what_was_fitted() -> None:
    first = read(PAGE, 0.0)
    assert twin([first, replace(first, at_s=1.0)]).course.step_times == (K,)


def test_usual_steps_say_how_the_machine_wandered() -> None:
    first = read(PAGE, 0.0)
    slow = [first, later(first, 1.0, 1.0, 13.0, 12.0), later(first, 2.0, 1.0, 14.0, 13.0), later(first, 3.0, 1.0, 17.0, 14.0)]
    once, thrice = twin(slow).usual_s(100)
    assert (once, thrice) == (pytest.approx(0.01 + 0.06 + 0.002), pytest.approx(3 * once))
