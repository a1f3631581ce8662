"""What a reader must know before the figures: what failed, what was not judged, and what the client itself did to them."""

from __future__ import annotations

from collections.abc import Sequence

from bench.analysis.at_load import at_load_of
from bench.analysis.knee import KEPT_PERCENT
from bench.analysis.steadiness import unsteadiness
from bench.lateness import lateness
from bench.point import Point
from bench.problem_kinds import by_kind
from bench.scorecard import figures_of


def caveats(points: Sequence[Point]) -> list[str]:
    """A line each, with what tells its point apart. Over all runs of a point."""
    return [f"{heading_of(point, points)}: {text}" for point in points for text in caveats_of(point)]


def heading_of(point: Point, points: Sequence[Point]) -> str:
    """What tells a point apart from the others: its configuration, workload and load; of a single one the first and the last."""
    parts = [point.label]
    if len({each.workload.name for each in points}) > 1:
        parts.append(point.workload.name)
    if len({each.load for each in points}) > 1 or len(points) == 1:
        parts.append(point.offered)
    return ", ".join(parts)


def caveats_of(point: Point) -> list[str]:
    """The client first: what it was late with is in every latency below."""
    return [
        *_client(point),
        *_steadiness(point),
        *_failures(point),
        *_refusals(point),
        *_connections(point),
        *_queue(point),
        *_length(point),
    ]


def _client(point: Point) -> list[str]:
    found = [text for repeat in point.repeats if (text := lateness(figures_of(repeat.scorecard)))]
    runs = f" in {len(found)} of {len(point.repeats)} runs" if len(point.repeats) > 1 else ""
    return [f"{found[0]}{runs}: these latencies are partly the client's own"] if found else []


def _steadiness(point: Point) -> list[str]:
    """Of a load that seems to be borne: one that is not needs no more requests to say so."""
    load = at_load_of(point)
    borne = (load.median("attainment_percent") or 0.0) >= KEPT_PERCENT
    short = unsteadiness(load) if borne else ""
    return [short] if short else []


def _failures(point: Point) -> list[str]:
    counts: dict[str, int] = {}
    for repeat in point.repeats:
        for problem, count in repeat.scorecard.summary.problems.items():
            counts[problem] = counts.get(problem, 0) + count
    return [f"{count} × {problem}" for problem, count in by_kind(counts).items()]


def _refusals(point: Point) -> list[str]:
    cards = [repeat.scorecard.summary for repeat in point.repeats]
    reason = next((card.refusal for card in cards if card.refusal), "")
    return [f"{sum(card.shed for card in cards)} × refused (429): {reason}"] if reason else []


def _connections(point: Point) -> list[str]:
    resends = sum(repeat.scorecard.summary.resends for repeat in point.repeats)
    return [f"{resends} × sent again, since the server had closed an idle connection"] if resends else []


def _queue(point: Point) -> list[str]:
    """A target for queue time that was not kept, or not measured."""
    if point.slo.queue_ms is None:
        return []
    kept = [repeat.scorecard.goodput.queue_kept for repeat in point.repeats]
    told = ((False, f"above {point.slo.queue_ms:g} ms"), (None, "not measured"))
    return [f"p95 of queue time {words} in {kept.count(verdict)} of {len(kept)} runs" for verdict, words in told if verdict in kept]


def _length(point: Point) -> list[str]:
    """Prompts sent as text that are not of the length that was meant."""
    off = max((repeat.scorecard.summary.text_off_percent or 0.0 for repeat in point.repeats), key=abs, default=0.0)
    return [f"the server counts {off:+g} % of tokens in prompts sent as text"] if off else []
