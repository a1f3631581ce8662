"""How wrong the step-time model has been on one replica, and how sure a prediction is (DESIGN §6, §7).

A prediction p (seconds, unscaled) is corrected to s·p, where s is the forgetful ratio of actual to predicted sums. What
is left, (actual − s·p) in units of (grain + 0.3·s·p), is kept in a window whose quantiles stand for a hand-set margin:
a constant part for the step that a request must wait out, a proportional part for what the model gets wrong.

A window says how it was; under a load that grows or falls, what comes is above or below. So every quantile that was promised is
steered by whether the promise held: up by its share where it did not, down by the rest where it did, which settles only where
they hold as often as they say (quantile tracking: Gibbs and Candès 2021, "Adaptive conformal inference under distribution shift").
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache
from statistics import NormalDist

from router.policy.prediction import LENGTHS

WINDOW = 256
PROPORTIONAL = 0.3
TRUSTED_AFTER = 8  # waits that were seen
_DOUBT = 4.0
_PRIOR_S = 0.5  # seconds of agreement that a new replica starts with
_FORGET = 0.985
_SCALE_MAX = 8.0
STEER = 0.05  # of the residuals' unit, by one promise
STEERED_MAX = 1.0  # either way
STEERED_FROM = 64  # outcomes: of fewer, the first misses of a new replica would make it careful for long
_HALF_LIFE_S = 30.0  # a scale that is no longer fed returns to 1: a wrong model never refuses for ever
# Cold: as if off by up to one unit below and a little more above, one in fifty by one and four tenths. A promise broken is worse than
# one not made. What is seen takes the place of the widest first: doubt shrinks with every outcome, on both sides alike.
_PRIOR_RESIDUALS = tuple(each for i in range(7, -1, -1) for each in (1.1 * i / 7, -i / 7))


@cache
def _normal(quantile: float) -> float:
    return NormalDist().inv_cdf(quantile)


class Calibration:
    """Scale and residual quantiles of one kind of prediction."""

    def __init__(self) -> None:
        self._actual_s = _PRIOR_S
        self._predicted_s = _PRIOR_S
        self._updated_s: float | None = None
        self._window: deque[float] = deque(_PRIOR_RESIDUALS)
        self._sorted: list[float] = sorted(_PRIOR_RESIDUALS)
        self._steered: dict[float, float] = {}
        self.observations = 0

    def scale(self, now: float) -> float:
        if self._updated_s is None:
            return 1.0
        ratio = self._actual_s / self._predicted_s
        age_s = max(0.0, now - self._updated_s)
        return float(min(_SCALE_MAX, max(1 / _SCALE_MAX, ratio)) ** (0.5 ** (age_s / _HALF_LIFE_S)))

    @property
    def doubt(self) -> float:
        """By how much a prediction may be too long: the model of a new replica was fitted to a few steps, of which one may have stalled."""
        return _DOUBT if self.observations < TRUSTED_AFTER else 1.0

    def quantile_s(self, predicted_s: float, grain_s: float, quantile: float, now: float) -> float:
        """The value that the actual time stays below with probability `quantile`; never negative."""
        return self.quantiles_s(predicted_s, grain_s, (quantile,), now)[0]

    def quantiles_s(self, predicted_s: float, grain_s: float, quantiles: Sequence[float], now: float) -> tuple[float, ...]:
        """`quantile_s` of each."""
        scaled = self.scale(now) * predicted_s
        unit_s = grain_s + PROPORTIONAL * scaled
        steered = self._steered
        return tuple([max(0.0, scaled + (self._residual(one) + steered.get(one, 0.0)) * unit_s) for one in quantiles])

    def kept(self, promises: Iterable[tuple[float, bool]]) -> None:
        """Whether the actual time stayed within what `quantile_s` had said, by quantile."""
        if self.observations < STEERED_FROM:
            return
        for quantile, within in promises:
            moved = self._steered.get(quantile, 0.0) + STEER * (quantile - 1.0 if within else quantile)
            self._steered[quantile] = min(STEERED_MAX, max(-STEERED_MAX, moved))

    def observe(self, predicted_s: float, actual_s: float, grain_s: float, now: float) -> None:
        """One prediction met its outcome. Predictions within a grain say nothing about the scale, only about the noise."""
        scaled = self.scale(now) * predicted_s
        unit_s = grain_s + PROPORTIONAL * scaled
        residual = (actual_s - scaled) / unit_s if unit_s > 0 else 0.0
        if not math.isfinite(residual):
            return
        self.observations += 1
        self._push(residual)
        if predicted_s > grain_s:
            keep = _FORGET
            self._actual_s = keep * self._actual_s + actual_s
            self._predicted_s = keep * self._predicted_s + predicted_s
            self._updated_s = now

    def _push(self, residual: float) -> None:
        if len(self._window) >= WINDOW or self.observations <= len(_PRIOR_RESIDUALS):
            oldest = self._window.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._window.append(residual)
        insort(self._sorted, residual)

    def _residual(self, quantile: float) -> float:
        """Linear between order statistics, of which the k-th of n is above the next value with probability k / (n + 1).

        Above the greatest of them, as of a normal distribution: sixteen values do not show what one in fifty exceeds.
        """
        count = len(self._sorted)
        if quantile > count / (count + 1):
            median = self._sorted[count // 2]
            return median + (self._sorted[-1] - median) * _normal(quantile) / _normal(count / (count + 1))
        position = min(max(0.0, quantile * (count + 1) - 1), count - 1.0)
        low = int(position)
        high = min(low + 1, count - 1)
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
        for one in self._of_ttft(new_tokens):
            one.observe(predicted_s, actual_s, grain_s, now)

    def kept_ttft(self, new_tokens: int, promises: Sequence[tuple[float, bool]]) -> None:
        for one in self._of_ttft(new_tokens):
            one.kept(promises)

    def _of_ttft(self, new_tokens: int) -> tuple[Calibration, Calibration]:
        return self._ttft, self._ttft_by_length[bisect_left(LENGTHS, new_tokens)]
