"""Fits the step-time model to the steps that ran: least squares with forgetting, never negative, in plain floats.

Kept are the weighted sums X = Σ wᵢ·xᵢ·xᵢᵀ and z = Σ wᵢ·xᵢ·yᵢ over the steps (old ones fade), beside a weak pull towards the
prior. The coefficients minimise the squared *relative* error over θ ≥ 0, found by coordinate descent from the last ones.
(Updating θ directly and cutting it at zero drifts: the correlations push the others the wrong way.)
"""

from __future__ import annotations

import math

from replica.contract.messages import StepTimeCoefficients
from replica.plan import Shape

# A step of typical size has features near one in these units.
_UNITS = (1.0, 256.0, 16.0, 8_192.0, 262_144.0)
# A small model on two cores. Wrong elsewhere, and outweighed after a few steps.
PRIOR = StepTimeCoefficients(a=5e-3, b=2e-4, c=1e-3, d=1e-6, e=1e-9)
_PRIOR_WEIGHT = 1e-4  # of a step whose time is all in that coefficient, of a usual size at least; it never fades
_FORGETTING = 0.995  # a step counts half after 140 more
_OUTLIER = 5.0  # typical relative residuals; what deviates more is cut to that
_TYPICAL_RATE = 0.05
_TYPICAL_FLOOR = 0.02
_SPREAD = 2.0  # typical residuals: a normal error exceeds 2.06 of its mean sizes once in twenty
_SHORTEST_S = 1e-5
_SWEEPS = 4


class StepTimeFit:
    """`observe` each completed step; `coefficients` are never negative.

    A stalled step moves the fit no more than an ordinary bad one: its residual is cut to a few typical ones. A lasting
    change is followed all the same, because what is typical grows with every cut residual.
    """

    def __init__(self, prior: StepTimeCoefficients = PRIOR, typical: float = 0.5) -> None:
        """`typical`: how far off the prior is taken to be, as a part of a step's time."""
        self._prior = _in_units(prior)
        self._pull = [_PRIOR_WEIGHT / max(value, usual, 1e-9) ** 2 for value, usual in zip(self._prior, _usual(self._prior), strict=True)]
        self._theta = list(self._prior)
        self._products: list[tuple[float, float, float, float, float]] = [(0.0,) * 5 for _ in range(5)]
        self._targets = [0.0] * 5
        self._typical = typical
        self._current = prior
        self.observed = 0  # steps learned from
        self.busy_s = 0.0  # that they took
        self.foreseen_s = 0.0  # that they were predicted to take

    @property
    def coefficients(self) -> StepTimeCoefficients:
        return self._current

    @property
    def spread(self) -> float:
        """By how much of what was predicted a step may take longer and still be none of the slowest in twenty, about; 0 … 1."""
        return min(1.0, _SPREAD * self._typical)

    @property
    def cautious(self) -> StepTimeCoefficients:
        """Of a step that takes longer by `spread`: who plans by the middle breaks the bound with every second full step."""
        k, factor = self._current, 1.0 + self.spread
        return StepTimeCoefficients(k.a * factor, k.b * factor, k.c * factor, k.d * factor, k.e * factor)

    def observe(self, shape: Shape, duration_s: float) -> None:
        """A step of `shape` took `duration_s`; what is not finite or negative is ignored."""
        if not math.isfinite(duration_s) or duration_s < 0:
            return
        x = (
            1.0,
            shape.prefill_tokens / _UNITS[1],
            shape.decodes / _UNITS[2],
            shape.context_tokens / _UNITS[3],
            shape.prefill_context / _UNITS[4],
        )
        predicted = max(_SHORTEST_S, sum(weight * value for weight, value in zip(self._theta, x, strict=True)))
        limit = _OUTLIER * max(self._typical, _TYPICAL_FLOOR)
        residual = max(-limit, min(limit, duration_s / predicted - 1.0))
        self._typical += max(_TYPICAL_RATE, 1.0 / (self.observed + 2)) * (abs(residual) - self._typical)
        target = predicted * (1.0 + residual)
        self._absorb(x, target, _weight(predicted, duration_s))
        self.observed += 1
        self.busy_s += duration_s
        self.foreseen_s += predicted

    def _absorb(self, x: tuple[float, ...], target: float, weight: float) -> None:
        """One step into the sums, then coordinate descent. Written out: it runs in every step."""
        x0, x1, x2, x3, x4 = x
        for i, (p0, p1, p2, p3, p4) in enumerate(self._products):
            scaled = weight * x[i]
            self._products[i] = (
                _FORGETTING * p0 + scaled * x0,
                _FORGETTING * p1 + scaled * x1,
                _FORGETTING * p2 + scaled * x2,
                _FORGETTING * p3 + scaled * x3,
                _FORGETTING * p4 + scaled * x4,
            )
            self._targets[i] = _FORGETTING * self._targets[i] + scaled * target
        theta = self._theta
        for _ in range(_SWEEPS):
            for i, row in enumerate(self._products):
                p0, p1, p2, p3, p4 = row
                gradient = p0 * theta[0] + p1 * theta[1] + p2 * theta[2] + p3 * theta[3] + p4 * theta[4]
                others = gradient - row[i] * theta[i]
                value = (self._targets[i] - others + self._pull[i] * self._prior[i]) / (row[i] + self._pull[i])
                theta[i] = value if value > 0.0 else 0.0
        self._current = StepTimeCoefficients(*(value / unit for value, unit in zip(theta, _UNITS, strict=True)))


def _in_units(k: StepTimeCoefficients) -> list[float]:
    return [value * unit for value, unit in zip((k.a, k.b, k.c, k.d, k.e), _UNITS, strict=True)]


def _usual(prior: list[float]) -> list[float]:
    """How large each coefficient may well be on a machine like this: what was cut at zero once, and kept, must not stay there for good."""
    general = _in_units(PRIOR)
    slower = max(1.0, sum(prior) / max(sum(general), 1e-9))
    return [slower * value for value in general]


def _weight(predicted: float, measured: float) -> float:
    """Makes errors relative: ten per cent of a short step weigh as much as of a long one."""
    return 1.0 / max(predicted, measured) ** 2
