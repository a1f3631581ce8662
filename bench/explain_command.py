"""`rantang bench explain`: what held a measured load back, with the evidence."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from bench.analysis.at_load import name_of
from bench.report.evidence_text import lines_of
from bench.result import load_requests, load_result


def explain(source: Path, console: Console) -> int:
    """Every point of the result. Raises ValueError for what is no result with points."""
    result = load_result(source)
    if not result.points:
        raise ValueError(f"{source.name} holds no measured points: there is nothing to explain")
    rows = load_requests(source)
    for i, point in enumerate(result.points):
        console.print(f"{point.workload.name}: {name_of(point, result.points)}", style="bold")
        for line in lines_of(result, i, rows):
            console.print(f"  {line}")
    return 0
