"""The ladder as bars: what each step gained over the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.analysis.number import plain
from bench.report.figure import colour, empty, new_figure


@dataclass(frozen=True, slots=True)
class Bar:
    """One step: the metric in each run."""

    name: str
    values: tuple[float, ...]

    @property
    def middle(self) -> float:
        ordered = sorted(self.values)
        half = len(ordered) // 2
        return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


@dataclass(frozen=True, slots=True)
class Panel:
    """One metric over all steps."""

    title: str
    unit: str
    bars: tuple[Bar, ...]


def draw_steps(panels: Sequence[Panel], title: str) -> Figure:
    """A panel per metric; each bar carries its value and the change over the bar before, the whisker spans the runs."""
    figure, axes = new_figure(len(panels), title, height=2.7, share_x=False)
    for each, panel in zip(axes, panels, strict=True):
        _draw(each, panel)
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title)
    axes.set_xlabel(panel.unit)
    known = [bar for bar in panel.bars if bar.values]
    if not known:
        empty(axes, "no run knows this")
        return
    places = list(range(len(known)))
    middles = [bar.middle for bar in known]
    whiskers = [[bar.middle - min(bar.values) for bar in known], [max(bar.values) - bar.middle for bar in known]]
    axes.barh(places, middles, xerr=whiskers, color=[colour(i) for i in places], height=0.62, capsize=3, alpha=0.85)
    axes.set_yticks(places, [bar.name for bar in known])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    top = max(max(bar.values) for bar in known) or 1.0
    axes.set_xlim(0, top * 1.3)
    for place, bar in zip(places, known, strict=True):
        before = known[place - 1].middle if place else 0.0
        change = f"  ({100 * (bar.middle / before - 1):+.0f} %)" if before else ""
        axes.text(max(bar.values) + top * 0.015, place, f"{plain(bar.middle)}{change}", va="center", fontsize=9)
