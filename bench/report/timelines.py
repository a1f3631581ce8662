"""One run over time: queue time with what was shed, who ran and waited, and how full the KV pool was."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.record import Outcome
from bench.report.figure import colour, empty, label, legend, new_figure
from bench.request_log import RequestRow
from bench.timeline import Timeline

SHED_BIN_S = 1.0
TARGET = "#B00000"

Series = list[tuple[float, float]]


def draw_timeline(
    timeline: Timeline, rows: Sequence[RequestRow], target_ms: float | None = None, title: str = "One run over time"
) -> Figure:
    """`rows` are the requests of that run: waits and refusals as the client saw them."""
    figure, (queue, load, memory) = new_figure(3, title, height=2.7)
    _draw_queue(queue, timeline, rows, target_ms)
    running, waiting = _known(timeline, timeline.running), _known(timeline, timeline.waiting)
    _step(load, running, colour(2), "running")
    _step(load, waiting, colour(3), "waiting")
    if not (running or waiting):
        empty(load, "the server does not say who runs and waits")
    load.yaxis.set_major_locator(MaxNLocator(integer=True))
    label(load, "", "requests")
    legend(load)
    _draw_memory(memory, timeline)
    label(memory, "time since the first request was due (s)", "KV pool (%)")
    return figure


def _draw_queue(axes: Axes, timeline: Timeline, rows: Sequence[RequestRow], target_ms: float | None) -> None:
    answered = [(row.due_ms / 1e3, row.ttft_ms) for row in rows if row.completed and row.ttft_ms is not None]
    queued = _known(timeline, timeline.queue_ms)
    if answered:
        axes.plot(*_columns(answered), linestyle="none", marker=".", color=colour(5), label="time to first token, by when due")
    if queued:
        axes.plot(*_columns(queued), color=colour(0), marker="o", markersize=3, label="queue time (server, mean)")
    if not (answered or queued):
        empty(axes, "nothing was answered")
    if target_ms is not None:
        axes.axhline(target_ms, color=TARGET, linewidth=1, linestyle="--", label=f"queue target {target_ms:g} ms")
    axes.set_ylim(bottom=0)
    label(axes, "", "ms")
    bins = _per_bin([row.due_ms / 1e3 for row in rows if row.outcome is Outcome.SHED])
    if not bins:
        legend(axes)
        return
    beside = axes.twinx()
    beside.bar(*_columns(bins), width=SHED_BIN_S, align="edge", color=colour(1), alpha=0.45, label="shed, by when due")
    beside.set_ylabel("shed (req/s)", color=colour(1))
    beside.set_ylim(0, 2.5 * max(count for _, count in bins))  # the upper part stays free for the lines
    beside.yaxis.set_major_locator(MaxNLocator(integer=True))
    beside.grid(False)
    legend(axes, beside, columns=4)


def _draw_memory(axes: Axes, timeline: Timeline) -> None:
    used = _known(timeline, timeline.kv_use_percent)
    if not used:
        empty(axes, "the server does not say how full its KV pool is")
        return
    axes.fill_between(*_columns(used), color=colour(5), alpha=0.4, linewidth=0)
    axes.plot(*_columns(used), color=colour(0), label="KV blocks in use")
    axes.set_ylim(0, 106)
    counts = _known(timeline, timeline.preemptions)
    grown = [at_s for (_, before), (at_s, now) in itertools.pairwise(counts) if now > before]
    if grown:
        axes.plot(grown, [102.0] * len(grown), linestyle="none", marker="v", color=colour(1), label="preempted since the sample before")
    legend(axes)


def _known(timeline: Timeline, column: Sequence[float | None]) -> Series:
    return [(at_s, value) for at_s, value in zip(timeline.time_s, column, strict=False) if value is not None]


def _columns(series: Series) -> tuple[list[float], list[float]]:
    return [at_s for at_s, _ in series], [value for _, value in series]


def _step(axes: Axes, series: Series, tint: str, words: str) -> None:
    if series:
        axes.step(*_columns(series), where="post", color=tint, label=words)


def _per_bin(times_s: Sequence[float]) -> Series:
    counts: dict[int, int] = {}
    for time_s in times_s:
        at = int(time_s // SHED_BIN_S)
        counts[at] = counts.get(at, 0) + 1
    return [(at * SHED_BIN_S, float(count)) for at, count in sorted(counts.items())]
