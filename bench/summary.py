"""From records to the figures that are compared. Wrong and failed answers are counted, and never lend a figure their speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.problem_kinds import by_kind
from bench.quantiles import Spread, spread_ms
from bench.record import Outcome, RequestRecord

SHORTEST_S = 0.001  # of a run: what divides rates is never 0


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
    retries: int = 0
    resends: int = 0  # an idle connection proved to be closed, and the request went out on a new one
    refusal: str = ""  # what the first 429 said
    text_off_percent: float | None = None  # of prompts sent as text: by how much the server counts more tokens than were meant


def summarize(records: Sequence[RequestRecord]) -> Summary:
    good = [record for record in records if record.outcome is Outcome.COMPLETED]
    shed = [record for record in records if record.outcome is Outcome.SHED]
    bad = [record for record in records if record.outcome in (Outcome.ERROR, Outcome.WRONG, Outcome.TIMEOUT)]
    start_s = min((record.scheduled_s for record in records), default=0.0)
    end_s = max((record.end_s for record in records if record.end_s is not None), default=start_s)
    duration_s = max(round(end_s - start_s, 3), SHORTEST_S)  # of every rate, goodput too
    output_tokens = sum(record.counts.completion_tokens or record.tokens_seen for record in good)
    return Summary(
        requests=len(records),
        completed=len(good),
        shed=len(shed),
        errors=len(bad),
        cancelled=sum(record.outcome is Outcome.CANCELLED for record in records),
        duration_s=duration_s,
        completed_per_s=round(len(good) / duration_s, 3),
        output_tokens_per_s=round(output_tokens / duration_s, 2),
        prompt_tokens=sum(record.counts.prompt_tokens or 0 for record in good),
        output_tokens=output_tokens,
        prefix_hit_percent=_hit_percent(good),
        latencies=Latencies(
            ttft_ms=spread_ms([record.ttft_s for record in good]),
            itl_ms=spread_ms([gap for record in good for gap in record.gaps_s()]),
            tpot_ms=spread_ms([record.tpot_s for record in good]),
            e2e_ms=spread_ms([record.e2e_s for record in good]),
            refusal_ms=spread_ms([record.answer_s for record in shed]),
            send_lag_ms=spread_ms([record.send_lag_s for record in records]),
        ),
        problems=_problems(bad),
        retries=sum(record.retries for record in records),
        resends=sum(record.resends for record in records),
        refusal=next((record.refusal.reason for record in shed if record.refusal.reason), ""),
        text_off_percent=_text_off_percent(good),
    )


def _hit_percent(good: Sequence[RequestRecord]) -> float | None:
    """Prompt tokens found in a prefix cache; None when the server does not report any."""
    known = [record for record in good if record.counts.cached_tokens is not None and record.counts.prompt_tokens]
    total = sum(record.counts.prompt_tokens or 0 for record in known)
    return round(100 * sum(record.counts.cached_tokens or 0 for record in known) / total, 2) if total else None


def _text_off_percent(good: Sequence[RequestRecord]) -> float | None:
    known = [record.counts for record in good if record.counts.text_tokens and record.counts.prompt_tokens is not None]
    meant = sum(counts.text_tokens or 0 for counts in known)
    return round(100 * (sum(counts.prompt_tokens or 0 for counts in known) / meant - 1), 2) if meant else None


def _problems(bad: Sequence[RequestRecord]) -> dict[str, int]:
    """How often each kind of fault was seen, with what the server said the first time where it said anything."""
    counts: Counter[str] = Counter()
    said: dict[str, str] = {}
    for record in bad:
        counts.update(record.faults)
        kind = f"status {record.status}" if record.refused else "error event"
        if record.refusal.reason:
            said.setdefault(kind, record.refusal.reason)
    kinds = by_kind(dict(sorted(counts.items())))
    return {f"{kind}: {said[kind]}" if kind in said else kind: count for kind, count in kinds.items()}
