"""Goodput and latency against offered load, the knee marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.analysis.at_load import AtLoad, ascending
from bench.analysis.knee import Knee, find_knee
from bench.report.figure import GREY, colour, dash, empty, label, legend, log_scale, new_figure


@dataclass(frozen=True, slots=True)
class Curve:
    """One configuration's sweep."""

    name: str
    points: tuple[AtLoad, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """A latency bound to be drawn: `metric` is one of those plotted."""

    metric: str
    value: float


LATENCIES = (("ttft_p95_ms", "p95 time to first token"), ("itl_p95_ms", "p95 inter-token latency"))


def draw_curves(curves: Sequence[Curve], targets: Sequence[Target] = (), title: str = "Goodput and latency against offered load") -> Figure:
    """Lines through the middle runs, every run a dot, the span between the runs shaded."""
    figure, (goodput, *latencies) = new_figure(1 + len(LATENCIES), title)
    _lines(goodput, curves, "goodput_per_s")
    label(goodput, "", "goodput (req/s)")
    top = max((point.offered_per_s for curve in curves for point in ascending(curve.points)), default=0.0)
    if top:
        goodput.plot([0, top], [0, top], color=GREY, linewidth=1, linestyle=":", label="all that is offered")
    for i, curve in enumerate(curves):
        knee = find_knee(curve.points)
        if knee.load_per_s is None:
            continue
        for axes in (goodput, *latencies):
            axes.axvline(knee.load_per_s, color=colour(i), linewidth=1, linestyle=(0, (1, 2)))
        name = f"{_mark(knee)} {knee.load_per_s:g} req/s" + (f" ({curve.name})" if len(curves) > 1 else "")
        goodput.plot(
            [knee.load_per_s], [knee.goodput_per_s or 0.0], marker="D", markersize=8, linestyle="none", color=colour(i), label=name,
            markeredgecolor="black",
        )  # fmt: skip
    goodput.set_ylim(bottom=0)
    for axes, (metric, words) in zip(latencies, LATENCIES, strict=True):
        _lines(axes, curves, metric)
        for target in targets:
            if target.metric == metric:
                axes.axhline(target.value, color="#B00000", linewidth=1, linestyle="--", label=f"target {target.value:g} ms")
        label(axes, "", f"{words}\n(ms)")
        log_scale(axes, "y")
    figure.axes[-1].set_xlabel("offered load (req/s)")
    for axes in figure.axes:
        legend(axes, columns=2 if axes is goodput else 4)
    return figure


def _mark(knee: Knee) -> str:
    if knee.unsteady:
        return "kept, but not offered for long:"
    return "knee" if knee.found else "knee not reached, above"


def _lines(axes: Axes, curves: Sequence[Curve], metric: str) -> None:
    drawn = False
    for i, curve in enumerate(curves):
        known = [(point, middle) for point in ascending(curve.points) if (middle := point.median(metric)) is not None]
        if not known:
            continue
        drawn = True
        loads = [point.offered_per_s for point, _ in known]
        axes.plot(loads, [middle for _, middle in known], color=colour(i), linestyle=dash(i), marker="o", label=curve.name)
        lows = [min(point.values(metric)) for point, _ in known]
        highs = [max(point.values(metric)) for point, _ in known]
        if lows != highs:
            axes.fill_between(loads, lows, highs, color=colour(i), alpha=0.15, linewidth=0)
    if not drawn:
        empty(axes, f"no run knows {metric}")
