"""Fits the step-time model to the steps that ran: recursive least squares with forgetting, in plain floats."""

from __future__ import annotations

import math

from replica.contract.messages import StepTimeCoefficients
from replica.plan import Shape

# A step of typical size has features near one in these units: keeps the 5 × 5 covariance well conditioned.
_UNITS = (1.0, 256.0, 16.0, 8_192.0, 262_144.0)
# A small model on two cores; wrong elsewhere, and outweighed after a few steps.
PRIOR = StepTimeCoefficients(a=5e-3, b=2e-4, c=1e-3, d=1e-6, e=1e-9)
_PRIOR_SPREAD_S = 0.05  # standard deviation of each prior coefficient, per unit above
_FORGETTING = 0.995
_OUTLIER = 5.0  # residuals beyond this many typical ones are cut to it
_SCALE_RATE = 0.05
_SCALE_FLOOR = 0.02  # of the predicted duration: what is noise anyway
_VARIANCE_MAX = 1.0  # forgetting pauses where nothing is learned, else the covariance would grow without bound


class StepTimeFit:
    """`observe` each completed step; `coefficients` are never negative.

    A stalled step moves the fit by no more than an ordinary bad one: its residual is cut to a few typical residuals. A
    lasting change is followed all the same, because what is typical grows with every cut residual.
    """

    def __init__(self, prior: StepTimeCoefficients = PRIOR) -> None:
        self._theta = [value * unit for value, unit in zip((prior.a, prior.b, prior.c, prior.d, prior.e), _UNITS, strict=True)]
        spread = _PRIOR_SPREAD_S**2
        self._covariance = [[spread if row == column else 0.0 for column in range(5)] for row in range(5)]
        self._typical_s = _PRIOR_SPREAD_S
        self._observed = 0
        self._current = prior

    @property
    def coefficients(self) -> StepTimeCoefficients:
        return self._current

    @property
    def observed(self) -> int:
        """Steps learned from."""
        return self._observed

    def observe(self, shape: Shape, duration_s: float) -> None:
        """A step of `shape` took `duration_s`. Not finite or negative durations are ignored."""
        if not math.isfinite(duration_s) or duration_s < 0:
            return
        x = (
            1.0,
            shape.prefill_tokens / _UNITS[1],
            shape.decodes / _UNITS[2],
            shape.context_tokens / _UNITS[3],
            shape.prefill_context / _UNITS[4],
        )
        predicted = sum(weight * value for weight, value in zip(self._theta, x, strict=True))
        limit = _OUTLIER * max(self._typical_s, _SCALE_FLOOR * predicted)
        cut = max(-limit, min(limit, duration_s - predicted))
        self._typical_s += max(_SCALE_RATE, 1.0 / (self._observed + 2)) * (abs(cut) - self._typical_s)
        self._update(x, cut)
        self._observed += 1
        self._current = StepTimeCoefficients(*(value / unit for value, unit in zip(self._theta, _UNITS, strict=True)))

    def _update(self, x: tuple[float, ...], residual: float) -> None:
        """One step of recursive least squares, then back into the region where no coefficient is negative."""
        covariance = self._covariance
        projected = [sum(row[j] * x[j] for j in range(5)) for row in covariance]
        spread = sum(x[j] * projected[j] for j in range(5))
        noise = max(self._typical_s, 1e-5) ** 2
        gain = 1.0 / (noise + spread)
        forgetting = _FORGETTING if max(covariance[j][j] for j in range(5)) < _VARIANCE_MAX else 1.0
        for i in range(5):
            pull = projected[i] * gain
            self._theta[i] = max(0.0, self._theta[i] + pull * residual)
            for j in range(i, 5):
                value = (covariance[i][j] - pull * projected[j]) / forgetting
                covariance[i][j] = covariance[j][i] = value
