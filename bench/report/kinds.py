"""A mixed workload by kind of request: figures of all together hide which kind missed its targets."""

from __future__ import annotations

from collections.abc import Sequence

from bench.analysis.number import short
from bench.quantiles import quantile
from bench.record import Outcome
from bench.report.page import Grid
from bench.request_log import RequestRow

TIMES = ("TTFT p50, ms", "TTFT p95, ms", "inter-token p95, ms", "end to end p95, ms")
HEADINGS = ("kind", "requests", "within SLO, %", "errors, %", "shed, %", *TIMES)
FAILED = (Outcome.ERROR, Outcome.WRONG, Outcome.TIMEOUT)


def by_kind(rows: Sequence[RequestRow]) -> Grid | None:
    """Of the requests of one point, all its runs together; None where they are of one kind only."""
    kinds = sorted({row.group for row in rows})
    if len(kinds) < 2:
        return None
    return Grid(HEADINGS, tuple(_cells(kind or "–", [row for row in rows if row.group == kind]) for kind in kinds))


def _cells(kind: str, rows: Sequence[RequestRow]) -> tuple[str, ...]:
    """Latencies of right answers alone, as in the scorecard; of what the client cancelled nothing is judged."""
    judged = sum(row.outcome is not Outcome.CANCELLED for row in rows)
    good = [row for row in rows if row.completed]
    ttfts = [row.ttft_ms for row in good if row.ttft_ms is not None]
    gaps = [gap for row in good for gap in row.gaps_ms]
    ends = [row.e2e_ms for row in good if row.e2e_ms is not None]
    figures = (
        100 * sum(row.accepted for row in rows) / judged if judged else None,
        100 * sum(row.outcome in FAILED for row in rows) / len(rows),
        100 * sum(row.outcome is Outcome.SHED for row in rows) / len(rows),
        *(quantile(ttfts, q) for q in (0.5, 0.95)),
        quantile(gaps, 0.95),
        quantile(ends, 0.95),
    )
    return (kind, str(len(rows)), *("–" if figure is None else short(figure) for figure in figures))
