"""From records to the figures that are compared. Wrong and failed answers are counted, and never lend a figure their speed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.record import Outcome, RequestRecord


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one run. Latencies count from the scheduled start, in milliseconds; None: nothing to take them from."""

    requests: int
    completed: int
    shed: int
    errors: int  # errors, time-outs and wrong answers
    cancelled: int
    duration_s: float
    completed_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_hit_percent: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    tpot_p50_ms: float | None  # (last − first token) / (tokens − 1) of a request
    e2e_p50_ms: float | None
    e2e_p95_ms: float | None
    shed_answer_p95_ms: float | None
    send_lag_p99_ms: float | None  # the client's own lateness
    problems: dict[str, int]


def quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value that at least the fraction q of the values do not exceed; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def summarize(records: Sequence[RequestRecord]) -> Summary:
    good = [record for record in records if record.outcome is Outcome.COMPLETED]
    shed = [record for record in records if record.outcome is Outcome.SHED]
    bad = [record for record in records if record.outcome in (Outcome.ERROR, Outcome.WRONG, Outcome.TIMEOUT)]
    start_s = min((record.scheduled_s for record in records), default=0.0)
    end_s = max((record.end_s for record in records if record.end_s is not None), default=start_s)
    duration_s = max(end_s - start_s, 1e-9)
    output_tokens = sum(record.completion_tokens or record.tokens_seen for record in good)
    return Summary(
        requests=len(records),
        completed=len(good),
        shed=len(shed),
        errors=len(bad),
        cancelled=sum(record.outcome is Outcome.CANCELLED for record in records),
        duration_s=round(duration_s, 3),
        completed_per_s=round(len(good) / duration_s, 3),
        output_tokens_per_s=round(output_tokens / duration_s, 2),
        prompt_tokens=sum(record.prompt_tokens or 0 for record in good),
        output_tokens=output_tokens,
        prefix_hit_percent=_hit_percent(good),
        ttft_p50_ms=_ms([record.ttft_s for record in good], 0.5),
        ttft_p95_ms=_ms([record.ttft_s for record in good], 0.95),
        itl_p50_ms=_ms([gap for record in good for gap in record.gaps_s()], 0.5),
        itl_p95_ms=_ms([gap for record in good for gap in record.gaps_s()], 0.95),
        tpot_p50_ms=_ms([_tpot_s(record) for record in good], 0.5),
        e2e_p50_ms=_ms([record.e2e_s for record in good], 0.5),
        e2e_p95_ms=_ms([record.e2e_s for record in good], 0.95),
        shed_answer_p95_ms=_ms([record.answer_s for record in shed], 0.95),
        send_lag_p99_ms=_ms([record.send_lag_s for record in records], 0.99),
        problems=_problems(bad),
    )


def _tpot_s(record: RequestRecord) -> float | None:
    times = record.chunk_times_s
    tokens_after_first = sum(record.chunk_tokens[1:])
    return (times[-1] - times[0]) / tokens_after_first if tokens_after_first else None


def _hit_percent(good: Sequence[RequestRecord]) -> float | None:
    """Prompt tokens found in a prefix cache; None when the server does not report any."""
    known = [record for record in good if record.cached_tokens is not None and record.prompt_tokens]
    total = sum(record.prompt_tokens or 0 for record in known)
    return round(100 * sum(record.cached_tokens or 0 for record in known) / total, 2) if total else None


def _problems(bad: Sequence[RequestRecord]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for record in bad:
        if record.outcome is Outcome.TIMEOUT:
            counts["timeout"] += 1
        if record.status is not None and record.status >= 300:
            counts[f"status {record.status}"] += 1
        counts.update(record.problems)
    return dict(sorted(counts.items()))


def _ms(values: Sequence[float | None], q: float) -> float | None:
    found = quantile([value for value in values if value is not None], q)
    return None if found is None else round(found * 1e3, 3)
