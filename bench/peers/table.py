"""The comparison as Markdown: a row for each figure, a column for each server, versions and commands below."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.peers.comparison import AGAIN, LONG_PROMPT, TEXT_OFF_PERCENT_MAX, Column, mean_of_ours, ratio
from bench.result import WorkResult
from bench.works import Work

FIGURES: tuple[tuple[str, Callable[[WorkResult], float | None]], ...] = (
    ("output tok/s", lambda work: work.summary.output_tokens_per_s),
    ("TTFT p50 ms", lambda work: work.summary.latencies.ttft_ms.p50),
    ("TTFT p95 ms", lambda work: work.summary.latencies.ttft_ms.p95),
    ("ITL p50 ms", lambda work: work.summary.latencies.itl_ms.p50),
    ("ITL p95 ms", lambda work: work.summary.latencies.itl_ms.p95),
    ("prefix hit %", lambda work: work.summary.prefix_hit_percent),
)


def markdown_of(columns: Sequence[Column], labels: Sequence[str], works: Sequence[Work]) -> str:
    shown = [column for column in columns if not column.skipped]
    lines = [
        "Closed loop, streaming, greedy, `ignore_eos`; one server at a time in one run, client on the same cores.",
        "",
        _row(["work", "", *(column.name for column in shown)]),
        _row(["---", "---", *("---:" for _ in shown)]),
    ]
    for work in works:
        for position, (title, get) in enumerate(FIGURES):
            found = [column.work(work.name) for column in shown]
            cells = [_cell(None if each is None else get(each)) for each in found]
            lines.append(_row([f"{work.name}: {work.description}" if position == 0 else "", title, *cells]))
        lines.append(_row(["", "completed", *(_completed(column.work(work.name)) for column in shown)]))
        for label in labels:
            by = "TTFT, theirs / ours" if work.name == LONG_PROMPT else "tok/s, ours / theirs"
            cells = [_ratio(column, label, columns, work.name) for column in shown]
            lines.append(_row(["", f"**{label}**: {by}", *cells]))
    lines.append(_row(["start to ready, s", "", *(_cell(column.start_s) for column in shown)]))
    lines.append(_row(["PSS MiB, idle / after", "", *(f"{_cell(column.idle_mib)} / {_cell(column.loaded_mib)}" for column in shown)]))
    lines.append(_row(["same greedy text", "", *(_same(column) for column in shown)]))
    lines += ["", *(_about(column) for column in columns if not column.name.endswith(AGAIN))]
    return "\n".join(lines) + "\n"


def _ratio(column: Column, label: str, columns: Sequence[Column], work: str) -> str:
    """In the second column of ours, what became of the first: the drift of the machine."""
    if column.name == label:
        return "1"
    if column.name == label + AGAIN:
        first = next((one.figure(work) for one in columns if one.name == label), None)
        drift = ratio(column.figure(work), first, work)
        return "–" if drift is None else f"{drift:.2f} × the first"
    value = ratio(mean_of_ours(columns, label, work), column.figure(work), work)
    return "–" if value is None else f"**{value:.2f}**"


def _completed(work: WorkResult | None) -> str:
    if work is None:
        return "–"
    off = work.summary.text_off_percent or 0.0
    other = f", prompts {off:+.0f} % of tokens" if abs(off) > TEXT_OFF_PERCENT_MAX else ""
    return f"{work.summary.completed}/{work.summary.requests}{other}"


def _same(column: Column) -> str:
    same = column.same_model
    if same is None:
        return "not checked"
    near = f", {same.near_tie} at a near tie" if same.near_tie else ""
    return f"{same.equal} of {same.prompts}{near}" + ("" if same.holds else f", {same.different + same.failed} OTHERS")


def _about(column: Column) -> str:
    if column.skipped:
        return f"* {column.name}: skipped, {column.skipped.splitlines()[0]}"
    notes = f" ({', '.join(column.notes)})" if column.notes else ""
    return f"* {column.name}: {column.version}{notes}: `{column.command}`"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cell(figure: float | None) -> str:
    if figure is None:
        return "–"
    return f"{figure:.1f}" if figure < 100 else f"{figure:.0f}"
