"""A step in the making: rows, and the sums that the step-time model wants."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from replica.contract.messages import StepTimeCoefficients
from replica.contract.step_time import predict_step_s
from replica.request import Request, State
from replica.step import BlockCopy, Row, Step


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a step, in the terms of contract.step_time."""

    prefill_tokens: int
    decodes: int
    context_tokens: int
    prefill_context: int

    def predict_s(self, coefficients: StepTimeCoefficients) -> float:
        return predict_step_s(
            coefficients,
            prefill_tokens=self.prefill_tokens,
            decodes=self.decodes,
            context_tokens=self.context_tokens,
            prefill_context=self.prefill_context,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """A Step and whose its rows are: requests[i] owns step.rows[i]."""

    step: Step
    requests: tuple[Request, ...]
    shape: Shape


class PlanBuilder:
    """Collects rows; `build` closes it."""

    def __init__(self, decode_requests: list[Request], decode_rows: list[Row], context_tokens: int) -> None:
        """Begins with the decodes, which a loop of its own has gathered; `context_tokens` is their sum."""
        self._requests = decode_requests
        self._rows = decode_rows
        self._copies: list[BlockCopy] = []
        self._decodes = len(decode_rows)
        self._prefill_tokens = 0
        self._context_tokens = context_tokens
        self._prefill_context = 0
        self._completed: set[int] = set()  # numbers of those whose chunk reaches the end of their tokens; membership only

    def __len__(self) -> int:
        return len(self._rows)

    def add_chunk(self, request: Request, row: Row) -> None:
        length = len(row.tokens)
        end = row.start + length
        self._requests.append(request)
        self._rows.append(row)
        self._prefill_tokens += length
        self._context_tokens += end
        self._prefill_context += length * end
        if end == len(request.tokens):
            self._completed.add(request.number)

    def add_copy(self, copy: BlockCopy) -> None:
        self._copies.append(copy)

    def catch_up(self) -> None:
        """The step before has been settled: who has left has no row, and the tokens that it drew are known."""
        requests, rows, decodes = self._requests, self._rows, self._decodes
        self._requests, self._rows = [], []
        self._prefill_tokens = self._context_tokens = self._prefill_context = 0
        self._completed.clear()
        running = State.RUNNING
        for request, row in zip(requests[:decodes], rows, strict=False):
            if request.state is running:
                self._requests.append(request)
                self._rows.append(Row(row.request, (request.tokens[-1],), row.start, row.blocks, row.draw))
                self._context_tokens += row.start + 1
        self._decodes = len(self._rows)
        for request, row in zip(requests[decodes:], rows[decodes:], strict=True):
            if request.state is running:
                self.add_chunk(request, row)

    def partials(self, running: Iterable[Request]) -> int:
        """How many of `running` this step leaves with more than the next token to compute."""
        return sum(1 for request in running if request.remaining > 1 and request.number not in self._completed)

    def shape(self) -> Shape:
        return Shape(
            prefill_tokens=self._prefill_tokens,
            decodes=self._decodes,
            context_tokens=self._context_tokens,
            prefill_context=self._prefill_context,
        )

    def build(self, step_id: int) -> Plan | None:
        """None if no row was added."""
        if not self._rows:
            return None
        step = Step(step_id=step_id, rows=tuple(self._rows), copies=tuple(self._copies))
        return Plan(step=step, requests=tuple(self._requests), shape=self.shape())
