"""`rantang bench run`: a workload at a load, on one configuration or on several that differ by one control each."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from bench import result, scorecard_table
from bench.arrivals import arrivals_s, check_arrivals
from bench.console import new_console
from bench.descriptors import check_streams
from bench.hours import HOURS_MAX, check_hours, spoken
from bench.load import Load
from bench.measurement import Measured, Question, measure
from bench.out_folder import writing
from bench.positive import check_positive
from bench.report_command import report_too
from bench.request_log import SUFFIX
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

    workloads: Sequence[str]  # NAME, or NAME@RATE in an open loop
    server: ServerOptions = field(default_factory=ServerOptions)
    load: Load | None = None  # None: the closed loop that the workload is meant for, or its own times
    slo: Slo = field(default_factory=Slo)
    seed: int = 0
    requests: int | None = None
    duration_s: float | None = None  # of arrivals at a rate, instead of a number of requests
    fit: Fit = field(default_factory=Fit)
    repeats: int = 1
    price_per_hour: float | None = None
    changes: Sequence[str] = ()
    folder: Path = result.RESULTS
    salt: str = ""
    report: bool = False
    max_hours: float = HOURS_MAX


@dataclass(frozen=True, slots=True)
class Asked:
    """One workload at one load. `source`: its name as it was given."""

    workload: Workload
    load: Load
    source: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be measured, checked."""

    options: RunOptions
    asked: tuple[Asked, ...]
    servers: tuple[tuple[str, ServerOptions], ...]
    salt: str

    @property
    def expected_s(self) -> float:
        """In which the requests of all runs become due."""
        runs = self.options.repeats * len(self.servers)
        return runs * sum(arrivals_s(each.workload, each.load) for each in self.asked)


def plan(options: RunOptions) -> Plan:
    """Raises ValueError for what cannot be measured, before anything starts."""
    if options.repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {options.repeats}")
    if not options.workloads:
        raise ValueError("no workload is named")
    if options.requests is not None and options.duration_s is not None:
        raise ValueError("requests and duration both say how many: give one of them")
    if options.changes and options.server.url is not None:
        raise ValueError("a control can be changed only on a stack that is started here: leave --url out")
    check_positive(price_per_hour=options.price_per_hour)
    if options.duration_s is not None:
        check_positive(duration=options.duration_s)
        check_hours(options.duration_s, options.max_hours)
    asked = tuple(asked_of(text, options) for text in options.workloads)
    if options.duration_s is not None and all(each.load.rate_per_s is None for each in asked):
        raise ValueError("a duration is of arrivals at a rate, and none is given: --rate, or NAME@RATE")
    check_used(options.load, asked)
    check_names(asked)
    planned = Plan(options, asked, tuple(configurations(options.server, options.changes)), options.salt or secrets.token_hex(4))
    check_hours(planned.expected_s, options.max_hours)
    return planned


def check_used(given: Load | None, asked: Sequence[Asked]) -> None:
    """Raises ValueError for a load beside workloads that all name their own: it would be dropped."""
    for name, flag in (("rate_per_s", "--rate"), ("streams", "--streams")):
        value = getattr(given, name, None)
        if value is not None and all(getattr(each.load, name) != value for each in asked):
            raise ValueError(f"{flag} {value:g} says nothing where every workload has a rate of its own (NAME@RATE): give one of them")


def check_names(asked: Sequence[Asked]) -> None:
    """Results and tables know a workload by its name and load: raises ValueError for two different ones of one name, or one given twice."""
    sources: dict[str, str] = {}
    once: set[tuple[str, Load]] = set()
    for each in asked:
        if sources.setdefault(each.workload.name, each.source) != each.source:
            raise ValueError(f"two different workloads are called {each.workload.name!r}: rename one of the files")
        if (each.workload.name, each.load) in once:
            raise ValueError(f"{each.workload.name} is given twice at one load ({each.load.description}): --repeats 2 measures it twice")
        once.add((each.workload.name, each.load))


def asked_of(text: str, options: RunOptions) -> Asked:
    """NAME with the given load, or the one it is meant for; NAME@RATE with that rate. Raises ValueError."""
    name, at, tail = text.rpartition("@")
    given = options.load or Load()
    if at and re.fullmatch(r"[0-9.]+", tail):
        try:
            load = replace(given, streams=None, rate_per_s=float(tail))
        except ValueError as error:
            why = f"{tail!r} is no rate" if tail.count(".") > 1 or tail == "." else error
            raise ValueError(f"{text!r}: {why}") from error
    else:
        name, load = text, given
    requests = options.requests
    if options.duration_s is not None and load.rate_per_s is not None:
        requests = max(1, round(load.rate_per_s * options.duration_s))
    works = workload(name, options.seed, requests, options.fit)
    check_arrivals(works, load)
    meant = replace(load, streams=works.streams) if load.streams is None and load.rate_per_s is None else load
    check_streams(meant, len(works))
    return Asked(works, meant, name)


def run(planned: Plan) -> int:
    """Measure, print, write; 1 when nothing was completed, or a stack did not start. What the others brought is written.

    So is what was finished when a signal ended the run; its exception then goes on.
    """
    console = new_console()
    measured: list[Measured] = []
    timeless = dict.fromkeys(each.workload.name for each in planned.asked if each.load.rate_per_s is None)
    if planned.options.duration_s is not None and timeless:
        console.print(f"without a rate no duration is kept, and all requests are sent: {', '.join(timeless)}")
    if planned.expected_s >= 1:
        console.print(f"the requests become due over {spoken(planned.expected_s)} in all")
    try:
        failed = _measure_all(planned, measured, console)
    except (KeyboardInterrupt, SystemExit):
        if measured:
            count = len(planned.asked) * len(planned.servers)
            console.print(f"interrupted: {len(measured)} of {count} measurements are finished, and kept", style="red")
            _tell(planned, measured, console)
        else:
            console.print("interrupted before any measurement was finished: nothing is written", style="red")
        raise
    if not measured:
        return 1
    _tell(planned, measured, console)
    return 0 if not failed and all(each.point.figure("completed_per_s") for each in measured) else 1


def _tell(planned: Plan, measured: Sequence[Measured], console: Console) -> None:
    """Print what was measured, and write it."""
    points = [each.point for each in measured]
    names = list(dict.fromkeys(point.workload.name for point in points))
    for name in names:
        scorecard_table.show([point for point in points if point.workload.name == name], console)
    configuration = {"seed": str(planned.options.seed), "salt": planned.salt}
    outcome = Result("run-" + "-".join(names), configuration, points=tuple(points))
    paths = write(outcome, measured, planned.options.folder)
    tell_paths(paths, console)
    if planned.options.report:
        tell_paths(report_too(paths[0], console), console)


def tell_paths(paths: Sequence[Path], console: Console) -> None:
    """Of a result before its pictures are drawn: whoever is interrupted then has it, and knows where."""
    for path in paths:
        console.print(f"written to {path.relative_to(result.ROOT) if path.is_relative_to(result.ROOT) else path}", soft_wrap=True)


def configurations(base: ServerOptions, changes: Sequence[str]) -> Iterator[tuple[str, ServerOptions]]:
    """(label, options): the baseline, then each change alone. Raises ValueError for a setting that does not exist."""
    check(base)
    yield BASELINE, base
    once: set[tuple[str, str]] = set()
    for text in changes:
        name, value = setting_of(text)
        changed = replace(base, settings={**base.settings, name: value})
        check(changed)
        if changed == base:
            raise ValueError(f"{name}={value} changes nothing: the baseline has it")
        if (name, value) in once:
            raise ValueError(f"the change {name}={value} is given twice: --repeats 2 measures it twice")
        once.add((name, value))
        yield f"{name}={value}", changed


def write(outcome: Result, measured: Sequence[Measured], folder: Path) -> tuple[Path, ...]:
    """JSON, Markdown, CSV and, where there are any, the requests; their paths. Raises SystemExit where they cannot be written."""
    with writing(folder):
        return _written(outcome, measured, folder)


def _written(outcome: Result, measured: Sequence[Measured], folder: Path) -> tuple[Path, ...]:
    path = result.write(outcome, folder, [row for each in measured for row in each.rows])
    by_work: dict[str, list[Measured]] = {}
    for each in measured:
        by_work.setdefault(each.point.workload.name, []).append(each)
    table, lines = path.with_suffix(".md"), path.with_suffix(".csv")
    table.write_text("\n".join(scorecard_table.markdown([each.point for each in group]) for group in by_work.values()))
    lines.write_text(scorecard_table.comma_separated([each.point for each in measured]))
    requests = path.with_name(path.stem + SUFFIX)
    return (path, table, lines, *([requests] if requests.exists() else []))


def _measure_all(planned: Plan, measured: list[Measured], console: Console) -> bool:
    """Appends all that can be measured to `measured`; whether a configuration failed."""
    failed = False
    for label, each in planned.servers:
        console.print(f"{label}: {'measuring ' + each.url if each.url else 'starting a stack'} …")
        try:
            with open_server(each) as server:
                if server.replicas_note and planned.options.price_per_hour is not None:
                    console.print(server.replicas_note)
                for asked in planned.asked:
                    question = _question(planned, asked, label)
                    measured.append(measure(server, question, index=len(measured), tell=console.print))
        except StackError as error:
            failed = True
            console.print(f"{label} drops out: {error}", style="red")
    return failed


def _question(planned: Plan, asked: Asked, label: str) -> Question:
    options = planned.options
    return Question(asked.workload, asked.load, options.slo, options.repeats, options.price_per_hour, planned.salt, label)
