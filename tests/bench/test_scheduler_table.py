"""The scheduler's table: its cases have the exact counts they are known for."""

from __future__ import annotations

import pytest

from bench import scheduler_table as table


@pytest.mark.parametrize(("batching", "small", "head"), [("adaptive", 0, 575), ("iteration", 577, 575)])
def test_small_requests_behind_a_head_that_does_not_fit(batching: table.Batching, small: int, head: int) -> None:
    assert table.behind_a_head(batching) == (small, head)


@pytest.mark.parametrize(("batching", "steps"), [("adaptive", 0), ("iteration", 299)])
def test_an_urgent_request_behind_two_runners(batching: table.Batching, steps: int) -> None:
    assert table.urgent_wait(batching) == steps


@pytest.mark.parametrize(("batching", "tokens", "delay"), [("adaptive", 1152, 1), ("iteration", 2176, 1)])
def test_eight_sharers_in_one_step(batching: table.Batching, tokens: int, delay: int) -> None:
    assert table.sharers(batching) == (tokens, delay)


def test_what_never_fits_and_what_is_there_already() -> None:
    assert table.refused_at_once()
    assert table.recomputed_of_a_full_hit() == 1


def test_known_growth_recomputes_nothing_and_plain_fcfs_a_quarter() -> None:
    ours = table.recompute_tax(0.6, "adaptive", known=True)
    plain = table.recompute_tax(0.6, "iteration", known=True)
    assert (ours.steps, ours.recomputed, ours.preemptions) == (1030, 0, 0)
    assert (plain.steps, plain.recomputed, plain.preemptions) == (946, 19522, 26)
    assert round(plain.percent, 1) == 23.0
    assert ours.cpu_s < plain.cpu_s


def test_every_row_of_the_cpu_part_is_measured() -> None:
    bench = table.decoding(16)
    assert len(bench.engine.roster.running) == 16 and all(request.remaining == 1 for request in bench.engine.roster.running)
    assert table.cost_s(16, 3) > 0 and table.report_s(16, 3) > 0
