"""A figure and how it looks: one style for every plot, and its bytes as PNG or SVG. No window, no global state."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

# Okabe and Ito's colours: told apart by the colour-blind, and in grey by their order.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
DASHES = ("-", "--", "-.", ":")
GREY = "#777777"
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.hashsalt": "rantang",  # the same figure gives the same file
    "svg.fonttype": "path",
}


def new_figure(rows: int, title: str, *, width: float = 8.0, height: float = 3.2, share_x: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure of `rows` plots, one above the other."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height * rows + 0.4), layout="constrained")
        grid = figure.subplots(rows, 1, sharex=share_x, squeeze=False)
        figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure, [row[0] for row in grid]


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> str:
    """Changes when the colours begin anew."""
    return DASHES[index // len(COLOURS) % len(DASHES)]


def label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def legend(axes: Axes, beside: Axes | None = None, columns: int = 3) -> None:
    """Above the plot, where it covers nothing; `beside` is a second scale of the same plot."""
    handles, names = axes.get_legend_handles_labels()
    if beside is not None:
        more, more_names = beside.get_legend_handles_labels()
        handles, names = [*handles, *more], [*names, *more_names]
    if handles:
        axes.legend(
            handles, names, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, borderaxespad=0.2, handlelength=1.6,
            frameon=False, fontsize=9,
        )  # fmt: skip


def log_scale(axes: Axes, which: Literal["x", "y"]) -> None:
    """Logarithmic, with plain numbers in the decades."""
    if which == "x":
        axes.set_xscale("log")
    else:
        axes.set_yscale("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 3.0, 5.0), numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 1e5 else f"{value:,.0f}"))


def empty(axes: Axes, why: str) -> None:
    """A plot without data says so."""
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color=GREY)
    axes.set_yticks([])


def image(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
    """The same bytes for the same figure: no date goes into it."""
    buffer = io.BytesIO()
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a name may hold a dollar sign
    with matplotlib.rc_context(_STYLE):
        if kind == "png":
            figure.savefig(buffer, format="png", dpi=110)
        else:
            figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def save(figure: Figure, folder: Path, name: str) -> tuple[Path, Path]:
    """As PNG and as SVG; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    png.write_bytes(image(figure, "png"))
    svg.write_bytes(image(figure, "svg"))
    return png, svg
