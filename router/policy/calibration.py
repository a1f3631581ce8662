"""How wrong the step-time model has been on one replica, and how sure a prediction is (DESIGN §6, §7).

A prediction p (seconds, unscaled) is corrected to s·p. What is left, (actual − s·p) in units of (grain + 0.3·s·p), is kept in a
window whose quantiles stand for a hand-set margin: a constant part for the step that a request must wait out, a proportional
part for what the model gets wrong.

s is the forgetful least-squares fit of actual to predicted in those units. A wait of two steps that was one step off says
little of ten steps: it weighs little, and takes the place of no guess of how far the model may be off.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

from router.policy.prediction import LENGTHS

WINDOW = 128
PROPORTIONAL = 0.3
TRUSTED_AFTER = 8  # waits that were seen
_DOUBT = 4.0
_PRIOR = 1 / PROPORTIONAL**2  # what a new replica starts with: it agrees, give or take that part
_FORGET = 0.97
_FINEST_S = 1e-9
_SCALE_MAX = 8.0
_HALF_LIFE_S = 30.0  # a scale that is no longer fed returns to 1: a wrong model never refuses for ever
# Cold: as if off by up to one unit below and one and four tenths above. A promise broken is worse than one not made. What is
# seen of long waits takes the place of the widest first: doubt shrinks with every outcome, on both sides alike.
_PRIOR_RESIDUALS = tuple(each for i in range(7, -1, -1) for each in (1.4 * i / 7, -i / 7))


class Calibration:
    """Scale and residual quantiles of one kind of prediction."""

    def __init__(self) -> None:
        self._actual = self._predicted = _PRIOR
        self._updated_s: float | None = None
        self._window: deque[float] = deque(_PRIOR_RESIDUALS)
        self._sorted: list[float] = sorted(_PRIOR_RESIDUALS)
        self._guesses = len(_PRIOR_RESIDUALS)  # still in the window
        self.observations = 0

    def scale(self, now: float) -> float:
        ratio = self._actual / self._predicted
        age_s = 0.0 if self._updated_s is None else max(0.0, now - self._updated_s)
        return float(min(_SCALE_MAX, max(1 / _SCALE_MAX, ratio)) ** (0.5 ** (age_s / _HALF_LIFE_S)))

    @property
    def doubt(self) -> float:
        """By how much a prediction may be too long: the model of a new replica was fitted to a few steps, of which one may have stalled."""
        return _DOUBT if self.observations < TRUSTED_AFTER else 1.0

    def quantile_s(self, predicted_s: float, grain_s: float, quantile: float, now: float) -> float:
        """The value that the actual time stays below with probability `quantile`; never negative."""
        scaled = self.scale(now) * predicted_s
        return max(0.0, scaled + self._residual(quantile) * (grain_s + PROPORTIONAL * scaled))

    def observe(self, predicted_s: float, actual_s: float, grain_s: float, now: float) -> None:
        """One prediction met its outcome. Predictions within a grain say nothing about the scale, only about the noise."""
        scaled = self.scale(now) * predicted_s
        unit_s = max(_FINEST_S, grain_s + PROPORTIONAL * scaled)
        residual = (actual_s - scaled) / unit_s
        if not math.isfinite(residual):
            return
        self.observations += 1
        self._push(residual, is_long=PROPORTIONAL * scaled >= grain_s)
        if predicted_s > grain_s:
            predicted, actual = predicted_s / unit_s, actual_s / unit_s
            self._actual = _FORGET * self._actual + predicted * actual
            self._predicted = _FORGET * self._predicted + predicted * predicted
            self._updated_s = now

    def _push(self, residual: float, *, is_long: bool = True) -> None:
        if len(self._window) >= WINDOW or (is_long and self._guesses):
            self._guesses = max(0, self._guesses - 1)  # they are the oldest
            oldest = self._window.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._window.append(residual)
        insort(self._sorted, residual)

    def _residual(self, quantile: float) -> float:
        """Linear between order statistics, of which the k-th of n is above the next value with probability k / (n + 1)."""
        position = min(max(0.0, quantile * (len(self._sorted) + 1) - 1), len(self._sorted) - 1.0)
        low = int(position)
        high = min(low + 1, len(self._sorted) - 1)
        return self._sorted[low] + (position - low) * (self._sorted[high] - self._sorted[low])


class Calibrations:
    """The calibrations of one replica: queue wait, and time to first token by the length to prefill."""

    _ENOUGH = 8  # observations before a bucket speaks for itself

    def __init__(self) -> None:
        self.wait = Calibration()
        self._ttft = Calibration()
        self._ttft_by_length = tuple(Calibration() for _ in range(len(LENGTHS) + 1))

    def ttft(self, new_tokens: int) -> Calibration:
        bucket = self._ttft_by_length[bisect_left(LENGTHS, new_tokens)]
        return bucket if bucket.observations >= self._ENOUGH else self._ttft

    def observe_ttft(self, new_tokens: int, predicted_s: float, actual_s: float, grain_s: float, now: float) -> None:
        for one in (self._ttft, self._ttft_by_length[bisect_left(LENGTHS, new_tokens)]):
            one.observe(predicted_s, actual_s, grain_s, now)
