"""What a step asks of a rank that does not sample, in arrays."""

from __future__ import annotations

from dataclasses import dataclass

from replica.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class RankStep:
    step_id: int
    inputs: StepInputs | None  # None: the step has no rows
    copies: tuple[tuple[int, int], ...] = ()  # as Step.copies: page to page, before the forward pass
    scored: tuple[tuple[int, int], ...] = ()  # (row, Row.score_from) of each row whose prompt is scored, in the order of rows
