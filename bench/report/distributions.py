"""How times to first token and gaps between tokens are distributed: cumulative, so that every quantile can be read off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.report.figure import GREY, colour, dash, empty, label, legend, log_scale, new_figure

MARKED = (0.5, 0.95)


@dataclass(frozen=True, slots=True)
class Distribution:
    """`values_ms` ascending and `shares` (0 to 1, ascending) of the requests or gaps that are at most so long."""

    name: str
    values_ms: tuple[float, ...]
    shares: tuple[float, ...]


def draw_distributions(
    ttft: Sequence[Distribution], itl: Sequence[Distribution], title: str = "Time to first token and inter-token latency"
) -> Figure:
    figure, axes = new_figure(2, title, share_x=False)
    _draw(axes[0], ttft, "time to first token (ms)", "share of requests")
    _draw(axes[1], itl, "inter-token latency (ms)", "share of gaps")
    return figure


def _draw(axes: Axes, distributions: Sequence[Distribution], x: str, y: str) -> None:
    label(axes, x, y)
    known = [each for each in distributions if each.values_ms]
    if not known:
        empty(axes, "no samples")
        return
    for i, each in enumerate(known):
        axes.step(each.values_ms, each.shares, where="post", color=colour(i), linestyle=dash(i), label=each.name)
    if min(each.values_ms[0] for each in known) > 0:
        log_scale(axes, "x")
    axes.set_ylim(0, 1.02)
    for share in MARKED:
        axes.axhline(share, color=GREY, linewidth=0.8, linestyle=":")
        axes.annotate(
            f"p{100 * share:g}", (1.0, share), xycoords=("axes fraction", "data"), fontsize=8, color=GREY, va="bottom", ha="right"
        )
    legend(axes)
