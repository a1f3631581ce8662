"""`rantang bench report`: the plots of a result and one HTML file with everything in it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

MISSING = "no plots: matplotlib is not installed (pip install 'rantang[bench]')"


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def report(source: Path, console: Console) -> Sequence[Path]:
    """The paths written beside `source`; none, and a line that says so, without matplotlib.

    Raises ValueError for no result, and where nothing can be written.
    """
    if not can_draw():
        console.print(MISSING)
        return ()
    from bench.report.document import write_report

    try:
        return write_report(source)
    except OSError as error:
        raise ValueError(f"no report can be written to {source.parent}: {error.strerror or error}") from error


def report_too(source: Path, console: Console) -> Sequence[Path]:
    """After a measurement that is written already: where its report cannot be, that is said, and nothing is lost."""
    try:
        return report(source, console)
    except ValueError as error:
        console.print(f"no report: {error}", style="red")
        return ()
