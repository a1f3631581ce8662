"""The knee of curves whose knee is known, and the loads a sweep offers to find it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.analysis import rates
from bench.analysis.at_load import AtLoad
from bench.analysis.knee import Knee, find_knee
from tests.bench.analysis.made_up import at_load, burst, served


@pytest.mark.parametrize(("capacity", "expected", "broken"), [(2.6, 2.5, 3.0), (1.0, 1.0, 1.5), (3.0, 3.0, 4.0)])
def test_the_last_load_within_capacity(capacity: float, expected: float, broken: float) -> None:
    knee = find_knee(served(capacity, (4.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)))
    assert (knee.load_per_s, knee.broken_per_s, knee.found) == (expected, broken, True)
    assert knee.goodput_per_s == pytest.approx(expected)
    assert f"knee at {expected:g} req/s" in str(knee)


def test_a_load_above_a_broken_one_is_no_knee() -> None:
    knee = find_knee([at_load(4, 99), at_load(5, 80), at_load(6, 99)])
    assert (knee.load_per_s, knee.broken_per_s) == (4, 5)
    assert knee.peak_goodput_per_s == pytest.approx(5.94)


def test_both_ends_are_told() -> None:
    never = find_knee([at_load(1, 50), at_load(2, 20)])
    assert (never.load_per_s, never.broken_per_s, never.found) == (None, 1, False)
    assert "lowest load" in str(never)
    always = find_knee([at_load(1, 100), at_load(2, 98)])
    assert (always.load_per_s, always.broken_per_s, always.found) == (2, None, False)
    assert "lies above" in str(always)
    assert "nothing was measured" in str(find_knee([]))


def test_the_middle_run_counts_and_a_run_without_figures_does_not() -> None:
    runs = ({"attainment_percent": 99.0}, {"attainment_percent": 97.0}, {"attainment_percent": 10.0})
    assert find_knee([AtLoad(1.0, runs)]).load_per_s == 1.0
    assert find_knee([AtLoad(1.0, ({"attainment_percent": None},))]).load_per_s is None


def test_the_burst_is_no_load() -> None:
    knee = find_knee([at_load(1, 100), burst(attainment_percent=3.0, goodput_per_s=9.0)])
    assert (knee.load_per_s, knee.broken_per_s, knee.peak_goodput_per_s) == (1, None, 1)


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0, 100)), min_size=1, max_size=12, unique_by=lambda pair: pair[0]))
def test_every_load_up_to_the_knee_is_kept_and_the_next_is_not(pairs: list[tuple[float, float]]) -> None:
    knee = find_knee([at_load(rate, share) for rate, share in pairs])
    for rate, share in pairs:
        if knee.load_per_s is not None and rate <= knee.load_per_s:
            assert share >= knee.kept_percent
        if rate == knee.broken_per_s:
            assert share < knee.kept_percent


def test_rates_around_a_capacity_begin_below_and_end_above_it() -> None:
    found = rates.around(3.0)
    assert found[0] < 1.0 and found[-1] > 3.0 and list(found) == sorted(found)
    for nothing in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="nothing was answered"):
            rates.around(nothing)


def test_the_next_rate_closes_in_and_stops() -> None:
    assert rates.next_rate(Knee(2.0, 2.0, 3.0, 2.0), 1, 3) == pytest.approx(2.45)
    assert rates.next_rate(Knee(2.9, 2.9, 3.0, 2.9), 1, 3) is None
    assert rates.next_rate(Knee(None, None, 1.0, None), 1, 3) == 0.5
    assert rates.next_rate(Knee(3.0, 3.0, None, 3.0), 1, 3) == 4.5
    assert rates.next_rate(Knee(None, None, None, None), 1, 3) is None


def test_closing_in_on_any_server_ends_with_its_knee_bracketed() -> None:
    tried = list(rates.around(5.0))
    for _ in range(12):
        more = rates.next_rate(find_knee(served(3.3, tried)), min(tried), max(tried))
        if more is None:
            break
        assert more not in tried
        tried.append(more)
    knee = find_knee(served(3.3, tried))
    assert knee.load_per_s is not None and knee.broken_per_s is not None
    assert knee.load_per_s <= 3.3 * 1.03 and knee.broken_per_s > 3.3
    assert knee.broken_per_s / knee.load_per_s <= rates.BRACKET


def test_given_rates_are_read_in_order_and_bad_ones_named() -> None:
    assert rates.parse("2, 0.5,1") == (0.5, 1.0, 2.0)
    for text, word in (("1,x", "'x'"), ("0", "positive"), ("1,inf", "positive"), ("", "''"), ("1,2,1.0", "--repeats")):
        with pytest.raises(ValueError, match=word):
            rates.parse(text)


def test_a_target_for_queue_time_limits_the_knee() -> None:
    def queued(rate: float, *queues: float | None) -> AtLoad:
        return AtLoad(rate, tuple({"attainment_percent": 100.0, "queue_p95_ms": queue} for queue in queues), queue_ms=50.0)

    knee = find_knee([queued(1, 40, 45, 900), queued(2, 60, 70, 10), queued(3, 10)])
    assert (knee.load_per_s, knee.broken_per_s) == (1, 2)
    unmeasured = find_knee([queued(1, None)])
    assert (unmeasured.load_per_s, unmeasured.broken_per_s) == (None, 1)
    assert find_knee([AtLoad(1, ({"attainment_percent": 100.0, "queue_p95_ms": 900.0},))]).load_per_s == 1, "nobody asked"


def test_a_knee_at_a_load_offered_too_briefly_is_doubted() -> None:
    runs = ({"attainment_percent": 100.0, "goodput_per_s": 0.85, "e2e_p95_ms": 8_740.0},)
    brief, long = AtLoad(4.0, runs, requests=8), AtLoad(4.0, runs, requests=80)
    assert "due within 1.8 s, and an answer takes up to 8.7 s (p95); 80 requests or more would tell" in str(find_knee([brief]))
    assert "lies above" not in str(find_knee([brief])), "nothing says so"
    assert find_knee([long]).unsteady == "" and "lies above" in str(find_knee([long])), "the control"
    broken = AtLoad(5.0, ({"attainment_percent": 10.0, "e2e_p95_ms": 90_000.0},), requests=80)
    assert find_knee([long, broken]).unsteady == "", "of the knee alone: that more is too much needs no steady load"
    assert find_knee([AtLoad(4.0, runs)]).unsteady == "", "where nobody knows how many there were"
