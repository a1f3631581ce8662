"""Scorecards of points side by side: for the terminal, as Markdown, and one line per run as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from rich.table import Table

from bench.analysis.number import short
from bench.point import Point
from bench.problem_kinds import by_kind
from bench.report import page
from bench.scorecard import FIGURES, Figure, figures_of

ABSENT = "–"


def terminal_table(points: Sequence[Point]) -> Table:
    """A column per point; the median of its runs, and in brackets how far they lie apart."""
    table = Table(title=_title(points), title_justify="left")
    for i, heading in enumerate(["", *(heading_of(point, points) for point in points)]):
        table.add_column(heading, justify="right" if i else "left")
    for cells in rows_of(points):
        table.add_row(*cells)
    return table


def markdown(points: Sequence[Point]) -> str:
    """The same table, with what was asked above it."""
    headings = ("", *(heading_of(point, points) for point in points))
    return f"{_title(points)}\n\n{page.markdown(page.Grid(headings, tuple(map(tuple, rows_of(points)))))}"


def comma_separated(points: Sequence[Point]) -> str:
    """One line per run with every figure; empty: not measured."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["label", "workload", "workload_hash", "load", "slo", "server", "run", *(figure.name for figure in FIGURES)])
    for point in points:
        facts = [point.label, point.workload.name, point.workload.hash, point.load.description, point.slo.description, point.served.name]
        for i, repeat in enumerate(point.repeats):
            values = figures_of(repeat.scorecard).values()
            writer.writerow([*facts, i, *("" if value is None else f"{value:g}" for value in values)])
    return out.getvalue()


def problem_lines(points: Sequence[Point]) -> list[str]:
    """What went wrong, by kind, over all runs of a point, a target for queue time that was not kept or not measured,
    and text that is not of the length that was meant."""
    lines: list[str] = []
    for point in points:
        counts: dict[str, int] = {}
        for repeat in point.repeats:
            for problem, count in repeat.scorecard.summary.problems.items():
                counts[problem] = counts.get(problem, 0) + count
        lines += [f"{point.label}: {count} × {problem}" for problem, count in by_kind(counts).items()]
        lines += _refusals(point)
        if resends := sum(repeat.scorecard.summary.resends for repeat in point.repeats):
            lines.append(f"{point.label}: {resends} × sent again, since the server had closed an idle connection")
        off = max((repeat.scorecard.summary.text_off_percent or 0.0 for repeat in point.repeats), key=abs, default=0.0)
        if off:
            lines.append(f"{point.label}: the server counts {off:+g} % of tokens in prompts sent as text")
        if point.slo.queue_ms is not None:
            kept = [repeat.scorecard.goodput.queue_kept for repeat in point.repeats]
            for verdict, words in ((False, f"above {point.slo.queue_ms:g} ms"), (None, "not measured")):
                if verdict in kept:
                    lines.append(f"{point.label}: p95 of queue time {words} in {kept.count(verdict)} of {len(kept)} runs")
    return lines


def _refusals(point: Point) -> list[str]:
    cards = [repeat.scorecard.summary for repeat in point.repeats]
    reason = next((card.refusal for card in cards if card.refusal), "")
    return [f"{point.label}: {sum(card.shed for card in cards)} × refused (429): {reason}"] if reason else []


def _title(points: Sequence[Point]) -> str:
    first = points[0]
    runs = len(first.repeats)
    repeats = "1 run" if runs == 1 else f"median of {runs} runs (least to most)"
    return f"{first.workload.description}; {first.workload.requests} requests; SLO: {first.slo.description}; {repeats}"


def heading_of(point: Point, points: Sequence[Point]) -> str:
    parts = [point.label]
    if len({each.workload.name for each in points}) > 1:
        parts.append(point.workload.name)
    if len({each.load for each in points}) > 1 or len(points) == 1:
        parts.append(point.offered)
    return ", ".join(parts)


def rows_of(points: Sequence[Point]) -> list[list[str]]:
    rows = []
    for figure in FIGURES:
        cells = [_cell(point, figure) for point in points]
        if any(cell != ABSENT for cell in cells):
            rows.append([f"{figure.title}{', ' + figure.unit if figure.unit else ''}", *cells])
    return rows


def _cell(point: Point, figure: Figure) -> str:
    spread = point.spread.get(figure.name)
    if spread is None:
        return ABSENT
    if spread.runs > 1 and spread.least != spread.most:
        return f"{_number(spread.median)} ({_number(spread.least)}–{_number(spread.most)})"
    return _number(spread.median)


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else short(value)
