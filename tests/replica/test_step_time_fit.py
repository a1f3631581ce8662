"""The step-time fit learns, stays sane, and shrugs off stalls."""

from __future__ import annotations

import math
import random

import pytest

from replica.contract.messages import StepTimeCoefficients
from replica.plan import Shape
from replica.step_time_fit import PRIOR, StepTimeFit

TRUE = StepTimeCoefficients(a=8e-3, b=5e-5, c=2e-4, d=4e-8, e=2e-10)


def shapes(count: int, seed: int = 1) -> list[Shape]:
    """Steps as a busy engine has them."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        decodes = rng.randrange(0, 48)
        prefill = rng.choice((0, 0, rng.randrange(1, 512)))
        context = decodes * rng.randrange(50, 900) + prefill
        made.append(Shape(prefill, decodes, context, prefill * rng.randrange(1, 2000)))
    return made


def scaled(k: StepTimeCoefficients, scale: float, *, d: float = 1.0, e: float = 1.0) -> StepTimeCoefficients:
    return StepTimeCoefficients(scale * k.a, scale * k.b, scale * k.c, scale * d * k.d, scale * e * k.e)


def trained(
    truth: StepTimeCoefficients, count: int = 300, stalls: int = 0, noise: float = 0.05, fit: StepTimeFit | None = None
) -> StepTimeFit:
    rng = random.Random(2)
    fit = fit or StepTimeFit()
    for i, shape in enumerate(shapes(count)):
        duration = shape.predict_s(truth) * rng.uniform(1 - noise, 1 + noise)
        fit.observe(shape, duration + (5.0 if stalls and i % (count // stalls) == count // stalls - 3 else 0.0))
    return fit


def worst_error(fit: StepTimeFit, truth: StepTimeCoefficients) -> float:
    return max(abs(shape.predict_s(fit.coefficients) / shape.predict_s(truth) - 1) for shape in shapes(100, seed=9))


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_it_learns_the_truth_at_any_scale(scale: float) -> None:
    truth = scaled(TRUE, scale)
    assert worst_error(trained(truth), truth) < 0.12


def test_a_few_steps_are_enough_for_the_order_of_magnitude() -> None:
    assert worst_error(trained(TRUE, count=30), TRUE) < 0.5


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("tiny", [0.0, 1e-15])
def test_what_was_known_as_nothing_is_learned_all_the_same(scale: float, tiny: float) -> None:
    """A fit that is cut at zero, kept and recalled: the next machine's context costs what it costs."""
    truth = scaled(TRUE, scale, d=20.0, e=20.0)
    fit = trained(truth, count=800, fit=StepTimeFit(StepTimeCoefficients(truth.a, truth.b, truth.c, d=tiny, e=tiny)))
    assert fit.coefficients.d == pytest.approx(truth.d, rel=0.1)
    assert 0.4 * truth.e < fit.coefficients.e < 1.2 * truth.e
    assert worst_error(fit, truth) < 0.05


def test_a_pull_by_what_was_known_alone_never_lets_go_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr("replica.step_time_fit.PRIOR", StepTimeCoefficients(0.0, 0.0, 0.0, 0.0, 0.0))
    truth = scaled(TRUE, 1.0, d=20.0, e=20.0)
    fit = trained(truth, count=800, fit=StepTimeFit(StepTimeCoefficients(truth.a, truth.b, truth.c, d=0.0, e=0.0)))
    assert fit.coefficients.d < 0.01 * truth.d and fit.coefficients.e < 0.01 * truth.e and worst_error(fit, truth) > 0.2


def test_stalled_steps_hardly_move_it() -> None:
    assert worst_error(trained(TRUE, stalls=6), TRUE) < 0.35


def test_plain_least_squares_would_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr("replica.step_time_fit._OUTLIER", 1e9)
    monkeypatch.setattr("replica.step_time_fit._weight", lambda predicted, measured: 1.0)
    assert worst_error(trained(TRUE, stalls=6), TRUE) > 1.0


def test_a_lasting_change_is_followed() -> None:
    slower = StepTimeCoefficients(*(4 * value for value in (TRUE.a, TRUE.b, TRUE.c, TRUE.d, TRUE.e)))
    fit = trained(TRUE)
    assert worst_error(trained(slower, count=600, fit=fit), slower) < 0.4


def too_slow(fit: StepTimeFit, noise: float) -> float:
    """Part of the steps that take longer than was cautiously predicted."""
    rng = random.Random(4)
    steps = [(shape.predict_s(fit.cautious), shape.predict_s(TRUE) * rng.gauss(1.0, noise)) for shape in shapes(2000, seed=5)]
    return sum(took > predicted for predicted, took in steps) / len(steps)


def noisily_trained(noise: float) -> StepTimeFit:
    rng, fit = random.Random(6), StepTimeFit()
    for shape in shapes(600):
        fit.observe(shape, shape.predict_s(TRUE) * rng.gauss(1.0, noise))
    return fit


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.2])
def test_one_step_in_twenty_takes_longer_than_the_cautious_prediction(noise: float) -> None:
    fit = noisily_trained(noise)
    assert 0.01 < too_slow(fit, noise) < 0.12
    assert fit.spread == pytest.approx(1.6 * noise, rel=0.6)


def test_the_prediction_of_the_middle_is_exceeded_by_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr("replica.step_time_fit._SPREAD", 0.0)
    assert too_slow(noisily_trained(0.1), 0.1) > 0.3


def test_the_spread_is_bounded() -> None:
    fit = StepTimeFit()
    assert fit.spread == 1.0
    for i in range(200):
        fit.observe(Shape(64, 4, 1000, 0), 10.0 ** (i % 5 - 3))
    assert 0.0 <= fit.spread <= 1.0


def test_coefficients_are_never_negative_and_unexciting_steps_do_not_blow_it_up() -> None:
    fit = StepTimeFit()
    shape = Shape(prefill_tokens=0, decodes=8, context_tokens=4000, prefill_context=0)
    rng = random.Random(3)
    for _ in range(5000):
        fit.observe(shape, 0.02 * rng.uniform(0.8, 1.2))
        k = fit.coefficients
        assert min(k.a, k.b, k.c, k.d, k.e) >= 0
    assert shape.predict_s(fit.coefficients) == pytest.approx(0.02, rel=0.1)
    assert 0 < Shape(256, 8, 4256, 256 * 256).predict_s(fit.coefficients) < 1.0


@pytest.mark.parametrize("duration", [math.nan, math.inf, -1.0])
def test_nonsense_is_ignored(duration: float) -> None:
    fit = StepTimeFit()
    fit.observe(Shape(1, 1, 1, 1), duration)
    assert fit.coefficients == PRIOR and fit.observed == 0


def test_zero_durations_are_survived() -> None:
    fit = StepTimeFit()
    for shape in shapes(300):
        fit.observe(shape, 0.0)
        assert 0 <= shape.predict_s(fit.coefficients) < 10
