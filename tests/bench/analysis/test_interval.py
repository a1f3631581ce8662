"""Welch's interval against cases worked out elsewhere, and against the frequency it promises."""

from __future__ import annotations

import random

import pytest

from bench.analysis.interval import difference, t_95


def test_a_case_worked_out_by_hand() -> None:
    """Variances 1 and 4 over 3 runs: error √(5/3), (25/9) / (17/18) = 2.94 degrees of freedom, of which 2 are counted."""
    found = difference([1.0, 2.0, 3.0], [5.0, 7.0, 9.0])
    half = 4.303 * (5 / 3) ** 0.5
    assert (found.a, found.b, found.change, found.percent) == (2.0, 7.0, 5.0, 250.0)
    assert (found.low, found.high) == (pytest.approx(5 - half), pytest.approx(5 + half))
    assert found.real is False


def test_one_run_cannot_tell() -> None:
    assert difference([1.0], [2.0, 2.0]).real is None
    assert difference([1.0, 1.0], [2.0]).real is None
    with pytest.raises(ValueError, match="nothing"):
        difference([], [1.0])


def test_equal_runs_and_the_same_runs() -> None:
    assert difference([2.0, 2.0], [2.0, 2.0]).real is False
    assert difference([2.0, 2.0], [3.0, 3.0]).real is True
    assert difference([1.0, 3.0], [1.0, 3.0]).real is False
    assert difference([0.0, 0.0], [1.0, 1.0]).percent is None
    assert difference([2.0], [3.0]).percent == pytest.approx(50.0)


def test_t_is_never_too_small() -> None:
    assert t_95(1) == 12.706
    assert t_95(0.9) == 12.706
    assert t_95(11) == t_95(10) and t_95(11.9) == t_95(10)
    assert t_95(1e9) == pytest.approx(1.98)


@pytest.mark.parametrize(("runs", "shift", "least", "most"), [(3, 0.0, 0.0, 0.08), (5, 0.0, 0.0, 0.08), (5, 4.0, 0.95, 1.0)])
def test_how_often_a_difference_is_claimed(runs: int, shift: float, least: float, most: float) -> None:
    """Seldom where there is none, nearly always where it is four times the spread of one run."""
    draw = random.Random(7)
    claimed = 0
    for _ in range(400):
        a = [draw.gauss(100, 1) for _ in range(runs)]
        b = [draw.gauss(100 + shift, 1) for _ in range(runs)]
        claimed += difference(a, b).real is True
    assert least <= claimed / 400 <= most
