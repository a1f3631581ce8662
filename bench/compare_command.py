"""`rantang bench compare`: for each figure of two results, whether the difference exceeds the spread of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.analysis.comparison import Pair, Row, Says, compare
from bench.analysis.number import plain
from bench.result import load_result

STYLES = {Says.BETTER: "green", Says.WORSE: "red"}
METHOD = (
    "± is the 95 % interval of the difference (Welch, over the runs of each side). Of twenty figures without any true "
    "difference about one exceeds it by chance."
)


def compare_results(a: Path, b: Path, metrics: Sequence[str], console: Console, *, force: bool = False) -> int:
    """B against A. Raises ValueError for what cannot be compared."""
    pairs = compare(load_result(a), load_result(b), metrics, force=force)
    for pair in pairs:
        console.print(table_of(pair, a.name, b.name))
        for note in pair.notes:
            console.print(f"note: {note}", style="yellow")
    if any(row.says is Says.CANNOT_TELL for pair in pairs for row in pair.rows):
        console.print("cannot tell: one run has no spread; measure each side with --repeats 3 or more")
    console.print(METHOD)
    return 0


def table_of(pair: Pair, a: str, b: str) -> Table:
    table = Table(title=f"{pair.label}: A = {a}, B = {b}", title_justify="left")
    for i, heading in enumerate(("figure", "A", "B", "B − A", "", "runs", "B is")):
        table.add_column(heading, justify="left" if i in (0, 6) else "right")
    for row in pair.rows:
        table.add_row(*cells_of(row), style=STYLES.get(row.says))
    return table


def cells_of(row: Row) -> tuple[str, ...]:
    found = row.difference
    half = "" if found.high is None else f"± {plain(found.high - found.change)}"
    percent = "" if found.percent is None else f"{found.percent:+.1f} %"
    sign = "+" if found.change > 0 else ""
    unit = f", {row.figure.unit}" if row.figure.unit else ""
    runs = f"{row.runs[0]}/{row.runs[1]}"
    return (
        f"{row.figure.title}{unit}",
        plain(found.a),
        plain(found.b),
        f"{sign}{plain(found.change)} {half}",
        percent,
        runs,
        str(row.says),
    )
