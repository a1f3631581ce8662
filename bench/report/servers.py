"""The page of `rantang bench peers`: servers side by side on every work, as bars and tables, with versions and commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.analysis.number import plain
from bench.peers.comparison import AGAIN, LONG_PROMPT
from bench.peers.table import FIGURES
from bench.report import figure
from bench.report.page import Block, Grid, Picture, Section, render
from bench.result import Metric, ResultFile, WorkResult

SHOWS = "Output tokens per second of every server on every work; of the long prompt, the time to first token"


def write_servers_report(source: Path, result: ResultFile) -> list[Path]:
    """One HTML file and its picture beside the result file `source`; the paths."""
    png, svg = figure.save(draw_servers(result), source.parent, f"{source.stem}-servers")
    page = source.with_suffix(".html")
    page.write_text(render("Rantang beside other servers", sections(result, Picture(png.read_bytes(), SHOWS))))
    return [page, png, svg]


def draw_servers(result: ResultFile) -> Figure:
    """A panel per work, a bar per server; ours that ran again is left out (its drift is in the table)."""
    works = works_of(result)
    drawn, axes = figure.new_figure(len(works), "Servers side by side", height=1.9, share_x=False)
    for each, (name, by_server) in zip(axes, works.items(), strict=True):
        _panel(each, name, {server: work for server, work in by_server.items() if not server.endswith(AGAIN)})
    return drawn


def works_of(result: ResultFile) -> dict[str, dict[str, WorkResult]]:
    """Work → server → what it did. A result names each of its works SERVER/WORK."""
    found: dict[str, dict[str, WorkResult]] = {}
    for work in result.works:
        server, _, name = work.name.rpartition("/")
        found.setdefault(name, {})[server] = work
    return found


def sections(result: ResultFile, picture: Picture) -> list[Section]:
    """Drawn, measured, compared, and how to do it again."""
    tables = [block for name, by_server in works_of(result).items() for block in _measured(name, by_server)]
    ratios = [metric for metric in result.metrics if metric.unit != "last / first"]
    drifts = [metric for metric in result.metrics if metric.unit == "last / first"]
    columns = [column for column in result.details.get("columns", []) if not str(column["name"]).endswith(AGAIN)]
    servers = tuple(
        (str(each["name"]), str(each["skipped"] or each["version"]), str(each["command"]), *map(_number, _sizes(each))) for each in columns
    )
    facts = (("date", result.date), ("commit", result.commit), ("command", result.command), *result.configuration.items())
    machine = tuple((key, str(value)) for key, value in result.machine.items())
    return [
        Section("Side by side", [picture]),
        Section("What was measured", tables),
        Section("Ratios: above 1, ours is better", [_metrics(ratios)]),
        Section("Drift of the machine: ours at the end ÷ ours at the beginning", [_metrics(drifts)]),
        Section(
            "Servers",
            [Grid(("server", "version", "command", "start to ready, s", "PSS idle, MiB", "PSS after load, MiB"), servers)],
        ),
        Section("How it was measured", [Grid(("fact", "value"), (*facts, *machine))]),
    ]


def _panel(axes: Axes, name: str, by_server: Mapping[str, WorkResult]) -> None:
    description = next(iter(by_server.values())).description
    axes.set_title(f"{name}: {description}")
    title, get = FIGURES[1] if name == LONG_PROMPT else FIGURES[0]
    axes.set_xlabel(f"{title}{', less is better' if name == LONG_PROMPT else ''}")
    values = {server: get(work) or 0.0 for server, work in by_server.items()}
    places = range(len(values))
    axes.barh(places, list(values.values()), color=[figure.colour(i) for i in places], height=0.62, alpha=0.85)
    axes.set_yticks(places, list(values))
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    top = max(values.values()) or 1.0
    axes.set_xlim(0, top * 1.15)
    for place, (server, value) in enumerate(values.items()):
        summary = by_server[server].summary
        lost = f"  ({summary.requests - summary.completed} of {summary.requests} failed)" if summary.completed < summary.requests else ""
        axes.text(value + top * 0.01, place, f"{plain(value)}{lost}", va="center", fontsize=9)


def _measured(name: str, by_server: Mapping[str, WorkResult]) -> list[Block]:
    rows = [(title, *(_number(get(work)) for work in by_server.values())) for title, get in FIGURES]
    rows.append(("completed", *(f"{work.summary.completed}/{work.summary.requests}" for work in by_server.values())))
    return [f"{name}: {next(iter(by_server.values())).description}", Grid(("", *by_server), tuple(rows))]


def _metrics(metrics: Sequence[Metric]) -> Grid:
    rows = tuple((metric.name, _number(metric.value), metric.unit, metric.bound) for metric in metrics)
    return Grid(("", "value", "unit", "bound"), rows)


def _sizes(column: Mapping[str, float | None]) -> tuple[float | None, ...]:
    return column["start_s"], column["idle_mib"], column["loaded_mib"]


def _number(value: float | None) -> str:
    return "–" if value is None else plain(value)
