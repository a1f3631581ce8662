"""From records to the figures that are compared. Wrong and failed answers are counted, and never lend a figure their speed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.record import Outcome, RequestRecord


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles in milliseconds; None: nothing to take them from."""

    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of completed requests, counted from the scheduled start; `refusal` of shed ones, `send_lag` of all."""

    ttft_ms: Spread
    itl_ms: Spread  # between events that carried tokens
    tpot_ms: Spread  # (last − first token) / (tokens − 1) of a request
    e2e_ms: Spread
    refusal_ms: Spread  # until the first byte of a 429
    send_lag_ms: Spread  # the client's own lateness


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one run."""

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
    latencies: Latencies
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
    output_tokens = sum(record.counts.completion_tokens or record.tokens_seen for record in good)
    return Summary(
        requests=len(records),
        completed=len(good),
        shed=len(shed),
        errors=len(bad),
        cancelled=sum(record.outcome is Outcome.CANCELLED for record in records),
        duration_s=round(duration_s, 3),
        completed_per_s=round(len(good) / duration_s, 3),
        output_tokens_per_s=round(output_tokens / duration_s, 2),
        prompt_tokens=sum(record.counts.prompt_tokens or 0 for record in good),
        output_tokens=output_tokens,
        prefix_hit_percent=_hit_percent(good),
        latencies=Latencies(
            ttft_ms=_spread([record.ttft_s for record in good]),
            itl_ms=_spread([gap for record in good for gap in record.gaps_s()]),
            tpot_ms=_spread([_tpot_s(record) for record in good]),
            e2e_ms=_spread([record.e2e_s for record in good]),
            refusal_ms=_spread([record.answer_s for record in shed]),
            send_lag_ms=_spread([record.send_lag_s for record in records]),
        ),
        problems=_problems(bad),
    )


def _tpot_s(record: RequestRecord) -> float | None:
    times = record.chunk_times_s
    tokens_after_first = sum(record.chunk_tokens[1:])
    return (times[-1] - times[0]) / tokens_after_first if tokens_after_first else None


def _hit_percent(good: Sequence[RequestRecord]) -> float | None:
    """Prompt tokens found in a prefix cache; None when the server does not report any."""
    known = [record for record in good if record.counts.cached_tokens is not None and record.counts.prompt_tokens]
    total = sum(record.counts.prompt_tokens or 0 for record in known)
    return round(100 * sum(record.counts.cached_tokens or 0 for record in known) / total, 2) if total else None


def _problems(bad: Sequence[RequestRecord]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for record in bad:
        if record.outcome is Outcome.TIMEOUT:
            counts["timeout"] += 1
        if record.status is not None and record.status >= 300:
            counts[f"status {record.status}"] += 1
        counts.update(record.problems)
    return dict(sorted(counts.items()))


def _spread(values_s: Sequence[float | None]) -> Spread:
    known = [value * 1e3 for value in values_s if value is not None]
    p50, p95, p99 = (quantile(known, q) for q in (0.5, 0.95, 0.99))
    return Spread(*(None if value is None else round(value, 3) for value in (p50, p95, p99)))
