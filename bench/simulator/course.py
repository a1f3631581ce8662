"""What the steps of a machine that wanders cost: coefficients that change as time goes on."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from replica.contract.messages import StepTimeCoefficients


@dataclass(frozen=True, slots=True)
class Course:
    """At least one stretch, of one cost each. They begin at `starts_s` (ascending, seconds of the trace) and last until the next; the
    first begins with the trace."""

    starts_s: tuple[float, ...]
    step_times: tuple[StepTimeCoefficients, ...]

    def at(self, at_s: float) -> StepTimeCoefficients:
        return self.step_times[max(0, bisect_right(self.starts_s, at_s) - 1)]
