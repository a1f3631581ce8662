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
    """The paths written beside `source`; none, and a line that says so, without matplotlib. Raises ValueError for no result."""
    if not can_draw():
        console.print(MISSING)
        return ()
    from bench.report.document import write_report

    return write_report(source)
