"""What a response must keep to count as goodput."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from bench.positive import check_positive
from bench.quantiles import quantile
from bench.record import Outcome, RequestRecord


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in milliseconds; None: not asked. Of each response, but `queue_ms`: the p95 that the server itself reports of a run."""

    ttft_ms: float | None = None
    itl_p95_ms: float | None = None  # of the response's own gaps between events
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    queue_ms: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a target that is no time."""
        check_positive(**{field.name: getattr(self, field.name) for field in fields(self)})

    @property
    def description(self) -> str:
        asked = [
            f"{field.name.removesuffix('_ms')} ≤ {getattr(self, field.name):g} ms"
            for field in fields(self)
            if getattr(self, field.name) is not None
        ]
        return ", ".join(asked) or "none"

    def kept_by(self, record: RequestRecord) -> bool:
        """Completed in time. A target for gaps is kept by a response that has none (of one token); what never came is late."""
        if record.outcome is not Outcome.COMPLETED:
            return False
        measured = (
            (self.ttft_ms, math.inf if record.ttft_s is None else record.ttft_s),
            (self.itl_p95_ms, quantile(record.gaps_s(), 0.95) if self.itl_p95_ms is not None else None),
            (self.tpot_ms, record.tpot_s),
            (self.e2e_ms, math.inf if record.e2e_s is None else record.e2e_s),
        )
        return all(target_ms is None or value_s is None or value_s * 1e3 <= target_ms for target_ms, value_s in measured)
