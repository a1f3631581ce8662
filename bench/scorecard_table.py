"""Scorecards of points side by side: for the terminal, as Markdown, and one line per run as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bench.analysis.number import short
from bench.caveats import caveats, heading_of
from bench.point import Point
from bench.report import page
from bench.scorecard import FIGURES, Figure, figures_of

ABSENT = "–"


def show(points: Sequence[Point], console: Console) -> None:
    """What is to be known first, then the table: below it, it would be read last."""
    show_caveats(points, console)
    console.print(terminal_table(points))


def show_caveats(points: Sequence[Point], console: Console) -> None:
    for line in caveats(points):
        console.print(line, style="red")


def terminal_table(points: Sequence[Point]) -> Table:
    """A column per point; the median of its runs, and in brackets how far they lie apart."""
    table = Table(title=_title(points), title_justify="left")
    for i, heading in enumerate(["", *(heading_of(point, points) for point in points)]):
        table.add_column(heading, justify="right" if i else "left")
    for cells in rows_of(points):
        table.add_row(*cells)
    return table


def markdown(points: Sequence[Point]) -> str:
    """The same table, with what was asked and what is to be known of it above it."""
    headings = ("", *(heading_of(point, points) for point in points))
    known = "\n".join(f"* {line}" for line in caveats(points))
    table = page.markdown(page.Grid(headings, tuple(map(tuple, rows_of(points)))))
    return "\n\n".join(part for part in (_title(points), known, table) if part)


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


def _title(points: Sequence[Point]) -> str:
    first = points[0]
    runs = len(first.repeats)
    repeats = "1 run" if runs == 1 else f"median of {runs} runs (least to most)"
    return f"{first.workload.description}; {first.workload.requests} requests; SLO: {first.slo.description}; {repeats}"


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
