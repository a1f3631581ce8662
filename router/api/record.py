"""What one client request looked like, gathered while it ran: the source of its metrics and its span."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from router.policy.classes import Terms
from router.policy.prediction import Prediction
from router.ports import Delta

ORDINARY = Terms()


class Outcome(enum.StrEnum):
    FINISHED = "finished"
    ABORTED = "aborted"  # the client left, or its stream was cut
    FAILED = "failed"  # our fault
    SHED = "shed"  # refused by the backend, nothing was generated


@dataclass(slots=True, eq=False)
class Record:
    """Times are of the router's monotonic clock, in seconds. `status` is the HTTP status the client saw."""

    endpoint: str
    arrival_s: float
    choices: int
    prompt_tokens: int = 0  # each prompt once
    cached_tokens: int = 0  # of those, as the first choice of each prompt reports it
    completion_tokens: int = 0
    first_token_s: float | None = None
    queue_time_s: float | None = None
    terms: Terms = ORDINARY
    predicted: Prediction | None = None  # of the first choice
    finish_reasons: list[str] = field(default_factory=list)
    status: int = 200
    reason: str = ""  # of a refusal or failure
    last_s: dict[int, float] = field(default_factory=dict)  # by choice: when its last Delta came

    def saw(self, delta: Delta, now_s: float) -> float | None:
        """Take note of a Delta; the seconds since the choice's previous one."""
        if delta.queue_time_s is not None and self.queue_time_s is None:
            self.queue_time_s = delta.queue_time_s
        if delta.predicted is not None and self.predicted is None:
            self.predicted = delta.predicted
        if not delta.token_ids:
            return None
        if self.first_token_s is None:
            self.first_token_s = now_s
        if delta.index in self.last_s:
            return self.saw_tokens(delta.index, now_s)
        self.last_s[delta.index] = now_s
        return None

    def saw_tokens(self, index: int, now_s: float) -> float:
        """More tokens of a choice, and nothing else; the seconds since the ones before."""
        previous_s, self.last_s[index] = self.last_s[index], now_s
        return now_s - previous_s
