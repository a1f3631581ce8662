"""`rantang bench sweep`: one configuration from below the expected load to saturation, the knee marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench import result, run_command, scorecard_table
from bench.console import new_console
from bench.measurement import Measured
from bench.report_command import report_too
from bench.result import Metric, Result
from bench.stack import StackError
from bench.sweep.carry_out import Swept, carry_out
from bench.sweep.plan import SweepPlan
from bench.sweep.state import SweepState


def sweep(plan: SweepPlan, state: SweepState) -> int:
    """Measure what is left, print, write; 1 when the server did not start or nothing was answered."""
    console = new_console()
    if state.points:
        console.print(f"going on with {len(state.points)} finished loads of {state.folder.name}")
    try:
        done = carry_out(plan, state, console.print)
    except (StackError, ValueError) as error:
        console.print(str(error), style="red")
        return 1
    points = done.points
    scorecard_table.show(points, console)
    console.print(str(done.knee), style="bold")
    configuration = {"seed": str(plan.options.seed), "label": plan.options.label}
    outcome = Result(f"sweep-{plan.workload.name}", configuration, metrics=metrics_of(done), points=points)
    paths = write(outcome, done, plan.options.folder)
    state.discard()
    run_command.tell_paths(paths, console)
    run_command.tell_paths(report_too(paths[0], console), console)
    return 0


def metrics_of(done: Swept) -> tuple[Metric, ...]:
    knee, label = done.knee, done.plan.options.label
    return (
        result.plain(f"{label}.knee", knee.load_per_s, "req/s"),
        result.plain(f"{label}.knee_goodput", knee.goodput_per_s, "req/s"),
        result.plain(f"{label}.first_load_not_kept", knee.broken_per_s, "req/s"),
        result.plain(f"{label}.peak_goodput", knee.peak_goodput_per_s, "req/s"),
    )


def write(outcome: Result, done: Swept, folder: Path) -> Sequence[Path]:
    """JSON, Markdown, CSV and the requests."""
    rows = done.rows
    measured = [Measured(point, tuple(row for row in rows if row.point == i)) for i, point in enumerate(done.points)]
    return run_command.write(outcome, measured, folder)
