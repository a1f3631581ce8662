"""`rantang bench choose`: the configuration that keeps the SLO at the least cost per accepted response, and why the others lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench import run_command
from bench.analysis.candidates import candidates_of
from bench.analysis.checklist import Answer, checklist
from bench.analysis.choice import Candidate, Choice, Demand, Verdict, choose
from bench.analysis.number import short
from bench.measurement import Measured
from bench.point import Point
from bench.report.page import Grid, markdown
from bench.report_command import report_too
from bench.request_log import RequestRow
from bench.result import Result, load_requests, load_result
from bench.scorecard_table import show_caveats
from bench.server import setting_of
from bench.slo import Slo
from bench.stack import StackError
from bench.sweep.carry_out import Swept, begin, carry_out
from bench.sweep.plan import SweepOptions, SweepPlan, plan_sweep
from bench.sweep.state import SweepState
from bench.sweep_command import metrics_of

MARKS = {True: "yes", False: "NO", None: "?"}


@dataclass(frozen=True, slots=True)
class Chosen:
    """The decision with what it was taken from. `answers` are of the winner, else of who brought the most within the SLO."""

    choice: Choice
    demand: Demand
    answers: tuple[Answer, ...]
    priced: bool


def configurations(base: SweepOptions, changes: Sequence[str]) -> Iterator[SweepOptions]:
    """The baseline, then each change: `max_num_seqs=8` alone, or several settings at once, `replicas=2,max_num_seqs=8`."""
    yield base
    for text in changes:
        given = dict(setting_of(part) for part in text.split(","))
        server = replace(base.server, settings={**base.server.settings, **given})
        yield replace(base, server=server, label=text)


def plans_of(base: SweepOptions, changes: Sequence[str]) -> list[SweepPlan]:
    """All checked before the first stack starts."""
    if changes and base.server.url is not None:
        raise ValueError("configurations can be swept only on stacks that are started here: leave --url out")
    plans = [plan_sweep(options) for options in configurations(base, changes)]
    for i, plan in enumerate(plans):
        same = next((other for other in plans[:i] if other.options.server == plan.options.server), None)
        if same is not None:
            raise ValueError(f"a configuration is given twice: {plan.options.label} is {same.options.label}")
    return plans


def begin_all(plans: Sequence[SweepPlan], *, restart: bool) -> list[SweepState]:
    """What is finished of each. Raises ResumeError when another sweep's state lies in the way."""
    return [begin(plan, restart=restart) for plan in plans]


def choose_by_sweeps(plans: Sequence[SweepPlan], states: Sequence[SweepState], demand: Demand, console: Console, *, priced: bool) -> int:
    """Sweep every configuration (what is finished is not measured again), decide, write. 1 when none keeps the SLO."""
    done: list[Swept] = []
    try:
        for plan, state in zip(plans, states, strict=True):
            try:
                done.append(carry_out(plan, state, console.print))
            except (StackError, ValueError) as error:
                console.print(f"{plan.options.label} drops out: {error}", style="red")
    finally:
        for state in states:
            state.tidy()
    points = [point for each in done for point in each.points]
    if not points:
        return 1
    chosen = decide(candidates_of(points), demand, context_of(plans[0]), priced=priced)
    show_caveats(points, console)
    show(chosen, console)
    measured: list[Measured] = []
    for each in done:
        rows = each.rows
        measured += [Measured(point, tuple(row for row in rows if row.point == i)) for i, point in enumerate(each.points)]
    measured = [renumbered(each, i) for i, each in enumerate(measured)]
    metrics = tuple(metric for each in done for metric in metrics_of(each))
    outcome = Result(f"choose-{plans[0].workload.name}", {"seed": str(plans[0].options.seed)}, metrics=metrics,
                     details={"texts": {"The choice": text_of(chosen)}}, points=tuple(points))  # fmt: skip
    paths = run_command.write(outcome, measured, plans[0].options.folder)
    for each in done:
        each.state.discard()
    run_command.tell_paths(paths, console)
    run_command.tell_paths(report_too(paths[0], console), console)
    return 0 if chosen.choice.winner else 1


def choose_from_files(sources: Sequence[Path], demand: Demand, console: Console, *, priced: bool, asked: Slo | None = None) -> int:
    """Read sweeps instead of running them. Raises ValueError for what cannot be weighed, or was judged by another SLO than `asked`."""
    if len({source.resolve() for source in sources}) < len(sources):
        raise ValueError("a sweep is given twice")
    points: list[Point] = []
    rows: list[RequestRow] = []
    for source in sources:
        points += load_result(source).points
        rows += load_requests(source)
    candidates = candidates_of(points)
    if asked is not None and asked != points[0].slo:
        raise ValueError(f"these were judged by {points[0].slo.description}, not by {asked.description}: leave --slo out, or sweep anew")
    chosen = decide(candidates, replace(demand, slo=points[0].slo), longest_of(rows), priced=priced)
    show_caveats(points, console)
    show(chosen, console)
    return 0 if chosen.choice.winner else 1


def decide(candidates: Sequence[Candidate], demand: Demand, context_tokens: int | None, *, priced: bool) -> Chosen:
    choice = choose(candidates, demand)
    return Chosen(choice, demand, checklist(asked_of(choice), demand.slo, context_tokens), priced)


def asked_of(choice: Choice) -> Verdict:
    """Whom the four questions are put to."""
    return choice.winner or max((verdict for verdict, _ in choice.others), key=lambda verdict: verdict.knee.peak_goodput_per_s or 0.0)


def show(chosen: Chosen, console: Console) -> None:
    grid = grid_of(chosen)
    table = Table(title=f"SLO: {chosen.demand.slo.description}", title_justify="left")
    for i, heading in enumerate(grid.headings[:-1]):
        table.add_column(heading, justify="right" if i else "left")
    for row in grid.rows:
        table.add_row(*row[:-1])
    console.print(table)
    for verdict, why in chosen.choice.others:
        console.print(f"{verdict.candidate.name} lost: {why}", soft_wrap=True)
    console.print(headline(chosen), style="bold")
    for answer in chosen.answers:
        console.print(f"{MARKS[answer.good]:>3}  {answer.question} {answer.answer}")


def headline(chosen: Chosen) -> str:
    winner = chosen.choice.winner
    if winner is None:
        return f"no configuration keeps the SLO at this load; {asked_of(chosen.choice).candidate.name} brought the most within it"
    alone = "; nothing else was tried" if not chosen.choice.others else ""
    return f"choose {winner.candidate.name}{alone}"


def text_of(chosen: Chosen) -> str:
    """For the report."""
    answers = "".join(f"{MARKS[answer.good]:>3}  {answer.question} {answer.answer}\n" for answer in chosen.answers)
    return f"{headline(chosen)}\n\n{markdown(grid_of(chosen))}\n{answers}"


def grid_of(chosen: Chosen) -> Grid:
    """The winner first."""
    unit = "cost per 1,000 accepted" if chosen.priced else "replica hours per 1,000 accepted"
    headings = ("configuration", "replicas", "knee, req/s", "judged at, req/s", "retries each", "idle, %", unit, "")
    winner = chosen.choice.winner
    rows = [_cells(winner, "chosen")] if winner else []
    rows += [_cells(verdict, why) for verdict, why in chosen.choice.others]
    return Grid(headings, tuple(rows))


def _cells(verdict: Verdict, why: str) -> tuple[str, ...]:
    figures = (verdict.knee.load_per_s, verdict.offered_per_s, verdict.retries_per_accepted, verdict.idle_percent, verdict.cost_per_1000)
    return (verdict.candidate.name, str(verdict.candidate.replicas), *("–" if each is None else short(each) for each in figures), why)


def context_of(plan: SweepPlan) -> int:
    """The longest prompt with its answer."""
    return max(call.prompt_tokens + call.output_tokens for call in plan.workload)


def longest_of(rows: Sequence[RequestRow]) -> int | None:
    return max(((row.prompt_tokens or 0) + row.output_tokens for row in rows if row.completed), default=None)


def renumbered(measured: Measured, index: int) -> Measured:
    """Its rows under the number of its point in a larger result."""
    return Measured(measured.point, tuple(msgspec.structs.replace(row, point=index) for row in measured.rows))
