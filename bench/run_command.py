"""`rantang bench run`: a workload at a load, on one configuration or on several that differ by one control each."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from bench import result, scorecard_table
from bench.load import Load
from bench.measurement import Measured, Question, measure
from bench.result import Result
from bench.server import ServerOptions, check, open_server, setting_of
from bench.slo import Slo
from bench.stack import StackError
from bench.traces import Fit
from bench.workload import Workload
from bench.workloads import workload

BASELINE = "baseline"
CONTROLS = ("max_num_batched_tokens=128", "max_num_seqs=8")  # a quarter and an eighth of the defaults


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`changes`: NAME=VALUE each; every one is measured alone, beside the baseline, on a stack of its own."""

    workloads: Sequence[str]
    server: ServerOptions = field(default_factory=ServerOptions)
    load: Load | None = None  # None: the closed loop that the workload is meant for, or its own times
    slo: Slo = field(default_factory=Slo)
    seed: int = 0
    requests: int | None = None
    fit: Fit = field(default_factory=Fit)
    repeats: int = 1
    price_per_hour: float | None = None
    changes: Sequence[str] = ()
    folder: Path = result.RESULTS
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be measured, checked."""

    options: RunOptions
    workloads: tuple[Workload, ...]
    servers: tuple[tuple[str, ServerOptions], ...]
    salt: str


def plan(options: RunOptions) -> Plan:
    """Raises ValueError for what cannot be measured, before anything starts."""
    if options.repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {options.repeats}")
    if not options.workloads:
        raise ValueError("no workload is named")
    if options.changes and options.server.url is not None:
        raise ValueError("a control can be changed only on a stack that is started here: leave --url out")
    asked = tuple(workload(name, options.seed, options.requests, options.fit) for name in options.workloads)
    return Plan(options, asked, tuple(configurations(options.server, options.changes)), options.salt or secrets.token_hex(4))


def run(planned: Plan) -> int:
    """Measure, print, write; 1 when nothing was completed."""
    console = Console() if sys.stdout.isatty() else Console(width=160)
    try:
        measured = _measure_all(planned, console)
    except StackError as error:
        console.print(str(error), style="red", highlight=False, markup=False)
        return 1
    points = [each.point for each in measured]
    for works in planned.workloads:
        console.print(scorecard_table.terminal_table([point for point in points if point.workload.name == works.name]))
    for line in scorecard_table.problem_lines(points):
        console.print(line, style="red", highlight=False, markup=False)
    name = "run-" + "-".join(each.name for each in planned.workloads)
    outcome = Result(name, {"seed": str(planned.options.seed), "salt": planned.salt}, points=tuple(points))
    for path in write(outcome, measured, planned.options.folder):
        console.print(f"written to {path.relative_to(result.ROOT) if path.is_relative_to(result.ROOT) else path}")
    return 0 if all(point.figure("completed_per_s") for point in points) else 1


def configurations(base: ServerOptions, changes: Sequence[str]) -> Iterator[tuple[str, ServerOptions]]:
    """(label, options): the baseline, then each change alone. Raises ValueError for a setting that does not exist."""
    check(base)
    yield BASELINE, base
    for text in changes:
        name, value = setting_of(text)
        changed = replace(base, settings={**base.settings, name: value})
        check(changed)
        yield f"{name}={value}", changed


def write(outcome: Result, measured: Sequence[Measured], folder: Path) -> tuple[Path, ...]:
    """JSON with its requests, Markdown and CSV; their paths."""
    path = result.write(outcome, folder, [row for each in measured for row in each.rows])
    by_work: dict[str, list[Measured]] = {}
    for each in measured:
        by_work.setdefault(each.point.workload.name, []).append(each)
    table, lines = path.with_suffix(".md"), path.with_suffix(".csv")
    table.write_text("\n".join(scorecard_table.markdown([each.point for each in group]) for group in by_work.values()))
    lines.write_text(scorecard_table.comma_separated([each.point for each in measured]))
    return path, table, lines


def load_for(works: Workload, given: Load | None) -> Load:
    """The given load; else the closed loop that the workload is meant for, or its own times."""
    if given is not None and (given.streams is not None or given.rate_per_s is not None):
        return given
    return replace(given or Load(), streams=works.streams)


def _measure_all(planned: Plan, console: Console) -> list[Measured]:
    measured: list[Measured] = []
    options = planned.options
    for label, each in planned.servers:
        console.print(f"{label}: {'measuring ' + each.url if each.url else 'starting a stack'} …", highlight=False)
        with open_server(each) as server:
            for works in planned.workloads:
                question = Question(
                    works,
                    load_for(works, options.load),
                    options.slo,
                    repeats=options.repeats,
                    price_per_hour=options.price_per_hour,
                    salt=planned.salt,
                    label=label,
                )
                measured.append(measure(server, question, index=len(measured), tell=console.print))
    return measured
