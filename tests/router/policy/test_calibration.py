from itertools import pairwise
from math import pi, sin
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.policy.calibration import PROPORTIONAL, STEERED_FROM, STEERED_MAX, WINDOW, Calibration, Calibrations


def taught(factor: float, count: int = 200, noise: float = 0.2) -> Calibration:
    one, random = Calibration(), Random(1)
    for i in range(count):
        predicted = random.uniform(0.0, 2.0)
        one.observe(predicted, predicted * factor * random.uniform(1 - noise, 1 + noise), 0.05, now=i * 0.1)
    return one


def test_cold_it_is_neutral_and_careful() -> None:
    one = Calibration()
    assert one.scale(0.0) == 1.0
    assert one.quantile_s(1.0, 0.1, 0.5, 0.0) == pytest.approx(1.0)
    assert 1.2 < one.quantile_s(1.0, 0.1, 0.98, 0.0) < 1.6
    assert 0.5 < one.quantile_s(1.0, 0.1, 0.1, 0.0) < 0.9


def test_every_outcome_makes_it_less_careful_until_the_guesses_are_gone() -> None:
    """A dozen exact predictions: what is guessed of the rest is moderate, or a burst at a fresh replica is refused what it would serve."""
    one = Calibration()
    margins = []
    for _ in range(16):
        margins.append(one.quantile_s(1.0, 0.1, 0.98, 0.0) - 1.0)
        one.observe(1.0, 1.0, 0.1, now=0.0)
    assert all(later <= earlier for earlier, later in pairwise(margins))
    assert margins[12] < 0.4 * margins[0]
    assert one.quantile_s(1.0, 0.1, 0.98, 0.0) == pytest.approx(1.0)


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.98])
def test_a_window_of_a_few_outcomes_covers_what_it_says(quantile: float) -> None:
    """The k-th of n is above the next one with probability k / (n + 1): else 0.98 of a window of 128 holds 0.973 of them."""
    random, below, tried = Random(3), 0, 0
    one = Calibration()
    for i in range(12_000):
        actual = 1.0 + random.random()
        if i >= WINDOW:
            below += actual <= one.quantile_s(1.0, 0.1, quantile, 0.0)
            tried += 1
        one._push((actual - 1.0) / 0.4)
        one.observations += 1
    assert below / tried == pytest.approx(quantile, abs=0.004)


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0, 4.0])
def test_a_model_wrong_by_a_factor_is_learned(factor: float) -> None:
    assert taught(factor).scale(20.0) == pytest.approx(factor, rel=0.15)


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.98])
def test_the_quantiles_cover_what_they_say(quantile: float) -> None:
    one, random, below = taught(1.5), Random(2), 0
    for i in range(400):
        predicted = random.uniform(0.0, 2.0)
        actual = predicted * 1.5 * random.uniform(0.8, 1.2)
        below += actual <= one.quantile_s(predicted, 0.05, quantile, now=20.0 + i * 0.1)
        one.observe(predicted, actual, 0.05, now=20.0 + i * 0.1)
    assert below / 400 == pytest.approx(quantile, abs=0.06)


def held_under_waves(quantile: float, *, steered: bool) -> float:
    """Of promises whose outcomes come twenty later, under a load that grows and falls once in 400: how often, after the first wave."""
    one, random, held, count, warm = Calibration(), Random(4), 0, 6_000, 400
    promises: list[tuple[float, float]] = []
    for i in range(count):
        actual = 1.0 + 0.5 * sin(2 * pi * i / 400) ** 3 + random.uniform(-0.1, 0.1)
        promises.append((one.quantile_s(1.0, 0.1, quantile, i * 0.1), actual))
        if i >= 20:
            bound, outcome = promises[i - 20]
            held += i >= warm and outcome <= bound
            if steered:
                one.kept([(quantile, outcome <= bound)])
            one.observe(1.0, outcome, 0.1, i * 0.1)
    return held / (count - warm)


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.98])
def test_promises_under_a_load_that_moves_hold_as_often_as_they_say(quantile: float) -> None:
    assert held_under_waves(quantile, steered=True) == pytest.approx(quantile, abs=0.02)


def test_without_steering_they_do_not() -> None:
    assert held_under_waves(0.9, steered=False) < 0.7


@given(st.lists(st.tuples(st.sampled_from([0.5, 0.9, 0.98]), st.booleans()), max_size=200))
def test_steering_is_bounded(promises: list[tuple[float, bool]]) -> None:
    one = Calibration()
    for _ in range(STEERED_FROM):
        one.observe(1.0, 1.0, 0.1, 0.0)
    unit_s = 0.1 + PROPORTIONAL
    before = {quantile: one.quantile_s(1.0, 0.1, quantile, 0.0) for quantile in (0.5, 0.9, 0.98)}
    one.kept(promises)
    for quantile, bound_s in before.items():
        assert abs(one.quantile_s(1.0, 0.1, quantile, 0.0) - bound_s) <= STEERED_MAX * unit_s + 1e-9


def test_the_first_few_outcomes_steer_nothing() -> None:
    one = Calibration()
    for _ in range(STEERED_FROM):
        before_s = one.quantile_s(1.0, 0.1, 0.98, 0.0)
        one.kept([(0.98, False)])
        assert one.quantile_s(1.0, 0.1, 0.98, 0.0) == before_s
        one.observe(1.0, 1.0, 0.1, 0.0)
    one.kept([(0.98, False)])
    assert one.quantile_s(1.0, 0.1, 0.98, 0.0) > before_s


def test_what_is_no_longer_fed_returns_to_one() -> None:
    one = taught(6.0)
    assert one.scale(20.0) > 4
    assert one.scale(20.0 + 300.0) == pytest.approx(1.0, abs=0.01)


def test_instant_predictions_do_not_move_the_scale() -> None:
    one = Calibration()
    for i in range(500):
        one.observe(0.0, 0.04, 0.05, now=i * 0.1)
    assert one.scale(50.0) == 1.0


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 10)), max_size=300))
@example([(5e-324, 0.0, 0.0)])
def test_it_is_bounded_and_finite_whatever_it_sees(observations: list[tuple[float, float, float]]) -> None:
    one = Calibration()
    for i, (predicted, actual, grain) in enumerate(observations):
        one.observe(predicted, actual, grain, now=float(i))
    assert 1 / 8 <= one.scale(float(len(observations))) <= 8
    assert len(one._window) == len(one._sorted) <= WINDOW
    assert one._sorted == sorted(one._window)
    assert one.quantile_s(1.0, 0.1, 0.98, 0.0) >= one.quantile_s(1.0, 0.1, 0.1, 0.0) >= 0.0


def test_a_length_speaks_for_itself_once_it_has_enough() -> None:
    one = Calibrations()
    for i in range(7):
        one.observe_ttft(3000, 1.0, 4.0, 0.01, now=float(i))
    assert one.ttft(100) is one.ttft(3000)
    one.observe_ttft(3000, 1.0, 4.0, 0.01, now=8.0)
    assert one.ttft(100) is not one.ttft(3000)


def covered(count: int, quantile: float = 0.98) -> float:
    """How often the quantile holds for the next of normal errors, after `count` of them."""
    draw = Random(1)
    held = 0
    for _ in range(1_500):
        one = Calibration()
        for _ in range(count):
            one.observe(1.0, max(0.0, draw.gauss(1.0, 0.2)), 2.0, 0.0)  # within a grain: the scale stays 1
        held += draw.gauss(1.0, 0.2) <= one.quantile_s(1.0, 2.0, quantile, 0.0)
    return held / 1_500


def test_few_observations_do_not_show_what_one_in_fifty_exceeds() -> None:
    assert covered(16) > 0.955
    assert covered(60) > 0.965


def test_the_greatest_of_few_is_exceeded_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr("router.policy.calibration._normal", lambda quantile: 1.0)
    assert covered(16) < 0.955
