"""The report of a result: one HTML file with everything in it, and the pictures beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.analysis.at_load import name_of
from bench.analysis.knee import KEPT_PERCENT, find_knee
from bench.caveats import caveats, heading_of
from bench.peers.comparison import PEERS
from bench.point import Point
from bench.report import figure
from bench.report.evidence_text import lines_of
from bench.report.kinds import by_kind
from bench.report.page import Block, Grid, Picture, Section, render
from bench.report.pictures import curves_of, pictures
from bench.report.servers import write_servers_report
from bench.request_log import RequestRow
from bench.result import ResultFile, load_requests, load_result
from bench.scorecard_table import rows_of

COLUMNS_MAX = 9  # of one table
KNEE = (
    f"The knee is the highest load at which, as at every lower one, {KEPT_PERCENT:g} % of the requests kept the SLO"
    " (and the run its target for queue time, where one is given)."
)
RECORDED_KNEE = "The knee"  # earlier results hold one in words; what the points say now stands instead


def write_report(source: Path) -> list[Path]:
    """Beside the result file `source`; the paths. Raises ValueError for what is no result with points, nor one of servers."""
    result = load_result(source)
    if result.name == PEERS and result.works:
        return write_servers_report(source, result)
    if not result.points:
        raise ValueError(f"{source.name} holds no measured points: there is nothing to draw")
    rows = load_requests(source)
    written: list[Path] = []
    drawn: list[Block] = []
    for name, shows, each in pictures(result, rows):
        png, svg = figure.save(each, source.parent, f"{source.stem}-{name}")
        written += [png, svg]
        drawn.append(Picture(png.read_bytes(), shows))
    page = source.with_suffix(".html")
    page.write_text(render(_title(result), sections(result, rows, drawn)))
    return [page, *written]


def sections(result: ResultFile, rows: Sequence[RequestRow], drawn: Sequence[Block]) -> list[Section]:
    """Asked, found, drawn, explained, and how to do it again."""
    points = result.points
    works = dict.fromkeys(
        f"{point.workload.name}: {point.workload.description}, {point.workload.requests} requests (hash {point.workload.hash})"
        for point in points
    )
    asked = [f"{text}; SLO: {points[0].slo.description}." for text in works]
    curves = [curve for curve in curves_of(points) if sum(not point.is_burst for point in curve.points) > 1]
    knees = [f"{curve.name}: {find_knee(curve.points)}." for curve in curves]
    knees += [KNEE] if knees else []
    explained = [_explained(result, i, rows) for i in range(len(points))]
    told = [
        Section("What was asked", asked),
        Section("What came of it", [*knees, *caveats(points), *_grids(result)]),
        *_kinds(points, rows),
        Section("Pictures", drawn),
        Section("What held it back", explained),
    ]
    extra = [Section(str(title), [f"{text}\n"]) for title, text in _texts(result).items()]
    return [*told[:1], *extra, *told[1:], Section("How it was measured", [_how(result)])]


def _kinds(points: Sequence[Point], rows: Sequence[RequestRow]) -> list[Section]:
    """Of the points whose requests are of several kinds; no section where none are."""
    grids = [(name_of(point, points), by_kind([row for row in rows if row.point == i])) for i, point in enumerate(points)]
    blocks = [block for name, grid in grids if grid is not None for block in (f"{name}:", grid)]
    return [Section("By kind of request", blocks)] if blocks else []


def _explained(result: ResultFile, index: int, rows: Sequence[RequestRow]) -> str:
    lines = lines_of(result, index, rows)
    return name_of(result.points[index], result.points) + "\n" + "".join(f"  {line}\n" for line in lines)


def _title(result: ResultFile) -> str:
    return f"Rantang benchmark: {result.name}"


def _grids(result: ResultFile) -> list[Block]:
    """Scorecards, a few columns at a time."""
    points = result.points
    return [
        Grid(("", *(heading_of(point, points) for point in part)), tuple(tuple(row) for row in rows_of(part)))
        for part in (points[i : i + COLUMNS_MAX] for i in range(0, len(points), COLUMNS_MAX))
    ]


def _texts(result: ResultFile) -> dict[str, str]:
    """Findings that the command itself wrote down, by title."""
    found = result.details.get("texts", {})
    return {str(title): str(text) for title, text in found.items() if title != RECORDED_KNEE} if isinstance(found, dict) else {}


def _how(result: ResultFile) -> Block:
    machine = tuple((key, str(value)) for key, value in result.machine.items())
    settings = tuple(result.configuration.items())
    servers = dict.fromkeys(f"{point.served.name} {point.served.version}: {point.served.command}" for point in result.points)
    facts = (("date", result.date), ("commit", result.commit), ("command", result.command), *(("server", text) for text in servers))
    return Grid(("fact", "value"), (*facts, *settings, *machine))
