"""`rantang bench ladder`: from static batching to what Rantang does, one step at a time, the same requests under each."""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import run_command
from bench.analysis.comparison import Says, says
from bench.analysis.interval import difference
from bench.analysis.number import plain
from bench.arrivals import arrivals_s, check_arrivals
from bench.descriptors import check_streams
from bench.hours import HOURS_MAX, check_hours
from bench.load import Load
from bench.measurement import Measured, Question, measure
from bench.point import Point
from bench.report.page import Grid, markdown
from bench.report_command import report_too
from bench.result import RESULTS, Result
from bench.scorecard import Figure, figure
from bench.scorecard_table import show_caveats
from bench.server import ServerOptions, check, open_server
from bench.slo import Slo
from bench.stack import StackError
from bench.workload import Workload
from bench.workloads import workload

_BASE = {"enable_chunked_prefill": "false", "enable_prefix_caching": "false"}
LADDER: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("static batching", {"batching": "static", **_BASE}),
    ("iteration-level FCFS", {"batching": "iteration", **_BASE}),
    ("+ chunked prefill", {"batching": "iteration", "enable_prefix_caching": "false"}),
    ("+ prefix caching", {"batching": "iteration"}),
    ("+ adaptive scheduling", {}),
)
# Every step is to serve the same requests: none is refused for having to wait.
PATIENT = {"queue_time_slo_s": "3600"}
METRICS = (
    "output_tokens_per_s",
    "completed_per_s",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "itl_p95_ms",
    "e2e_p95_ms",
    "attainment_percent",
    "prefix_hit_percent",
)
DRAWN = ("output_tokens_per_s", "ttft_p95_ms", "itl_p95_ms", "e2e_p95_ms")


@dataclass(frozen=True, slots=True)
class LadderOptions:
    workload: str
    slo: Slo
    load: Load
    server: ServerOptions = field(default_factory=ServerOptions)
    requests: int | None = None
    repeats: int = 1
    seed: int = 0
    folder: Path = RESULTS
    max_hours: float = HOURS_MAX


@dataclass(frozen=True, slots=True)
class LadderPlan:
    options: LadderOptions
    workload: Workload
    steps: tuple[tuple[str, ServerOptions], ...]
    salt: str


def plan_ladder(options: LadderOptions) -> LadderPlan:
    """Raises ValueError for what cannot be measured, before the first stack starts."""
    if options.server.url is not None:
        raise ValueError("the steps are settings of the engine: leave --url out to have each started")
    if options.repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {options.repeats}")
    works = workload(options.workload, options.seed, options.requests)
    check_arrivals(works, options.load)
    check_streams(options.load, len(works))
    check_hours(len(LADDER) * options.repeats * arrivals_s(works, options.load), options.max_hours)
    steps = tuple((name, replace(options.server, settings={**PATIENT, **options.server.settings, **settings})) for name, settings in LADDER)
    for _, server in steps:
        check(server)
    return LadderPlan(options, works, steps, secrets.token_hex(4))


def ladder(plan: LadderPlan, console: Console) -> int:
    """Measure each step on a stack of its own, print, write; the steps before one that does not start, or a signal, are written too."""
    measured: list[Measured] = []
    failed = False
    ended: BaseException | None = None
    options = plan.options
    try:
        for i, (name, server_options) in enumerate(plan.steps):
            console.print(f"step {i + 1} of {len(plan.steps)}, {name}: starting a stack …")
            with open_server(server_options) as server:
                asked = Question(plan.workload, options.load, options.slo, options.repeats, salt=plan.salt, label=name)
                measured.append(measure(server, asked, index=i, tell=console.print))
    except StackError as error:
        failed = True
        console.print(str(error), style="red")
    except (KeyboardInterrupt, SystemExit) as error:
        if not measured:
            console.print("interrupted before any step was finished: nothing is written", style="red")
            raise
        ended = error
        console.print(f"interrupted: {len(measured)} of {len(plan.steps)} steps are finished, and kept", style="red")
    if not measured:
        return 1
    points = [each.point for each in measured]
    grid = gains(points)
    show_caveats(points, console)
    show(grid, console)
    text = f"{plan.workload.description}; {options.load.description}.\n\n{markdown(grid)}\n{LEGEND}\n"
    configuration = {"seed": str(options.seed), "salt": plan.salt}
    outcome = Result(f"ladder-{plan.workload.name}", configuration, details={"texts": {"Each step's gain": text}}, points=tuple(points))
    paths = run_command.write(outcome, measured, options.folder)
    table = paths[0].with_name(f"{paths[0].stem}-gains.md")
    table.write_text(text)
    run_command.tell_paths([*paths, table], console)
    run_command.tell_paths([*draw(points, paths[0]), *report_too(paths[0], console)], console)
    if ended is not None:
        raise ended
    return 0 if not failed and all(point.figure("completed_per_s") for point in points) else 1


LEGEND = "In brackets the change over the step before; ? where it does not exceed the spread of the runs, or there is only one."


def gains(points: Sequence[Point]) -> Grid:
    """A row per step: the median of each figure and its change over the step before."""
    figures = [figure(name) for name in METRICS]
    figures = [each for each in figures if any(each.name in point.spread for point in points)]
    rows = []
    for i, point in enumerate(points):
        before = points[i - 1] if i else None
        rows.append((point.label, *(_cell(point, before, each) for each in figures)))
    return Grid(("step", *(f"{each.title}{', ' + each.unit if each.unit else ''}" for each in figures)), tuple(rows))


def _cell(point: Point, before: Point | None, each: Figure) -> str:
    values = values_of(point, each)
    if not values:
        return "–"
    middle = point.spread[each.name].median
    earlier = values_of(before, each) if before is not None else ()
    if not earlier:
        return plain(middle)
    found = difference(earlier, values)
    sign = "+" if found.change > 0 else ""
    sure = says(found, each.better) not in (Says.SAME, Says.CANNOT_TELL)
    change = f"{found.percent:+.0f} %" if found.percent is not None else f"{sign}{plain(found.change)}"
    return f"{plain(middle)} ({change}{'' if sure else '?'})"


def values_of(point: Point, each: Figure) -> tuple[float, ...]:
    return tuple(value for repeat in point.repeats if (value := each.get(repeat.scorecard)) is not None)


def show(grid: Grid, console: Console) -> None:
    table = Table(title="static against continuous batching", title_justify="left")
    for i, heading in enumerate(grid.headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=i == 0)
    for row in grid.rows:
        table.add_row(*row)
    console.print(table)
    console.print(LEGEND)


def draw(points: Sequence[Point], beside: Path) -> Sequence[Path]:
    """The steps as bars; nothing without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return ()
    from bench.report import figure as figures
    from bench.report.steps import Bar, Panel, draw_steps

    panels = [
        Panel(each.title, each.unit, tuple(Bar(point.label, values_of(point, each)) for point in points))
        for each in (figure(name) for name in DRAWN)
    ]
    return figures.save(draw_steps(panels, "From static to continuous batching"), beside.parent, f"{beside.stem}-steps")
