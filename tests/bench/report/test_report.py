"""Plots and the page: drawn from results made up, looked at by what is in them."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
from msgspec import structs
from typer.testing import CliRunner

from bench.analysis.at_load import name_of
from bench.analysis.number import plain
from bench.cli import app
from bench.console import PlainConsole
from bench.load import BURST_RATE_PER_S, Load
from bench.point import Point
from bench.record import Outcome
from bench.result import Result, write
from bench.timeline import Timeline
from tests.bench.made_up_results import FACTS, card, point, result_file, rows_for

pytest.importorskip("matplotlib")
from bench.report import figure
from bench.report.curves import Curve, Target, draw_curves
from bench.report.distributions import Distribution, draw_distributions
from bench.report.document import write_report
from bench.report.page import Grid, Picture, Section, markdown, render
from bench.report.pictures import _distribution, curves_of, pictures, telling
from bench.report.steps import Bar, Panel, draw_steps
from bench.report.timelines import draw_timeline
from bench.report_command import report_too

OTHERS = (Outcome.WRONG, Outcome.ERROR, Outcome.CANCELLED)
TIMELINE = Timeline((0.0, 1.0, 2.0), (1, 4, 4), (0, 3, 9), (10, 60, 99), (5, 50, None), (0, 0, 3), (0, 0, 2), (None,) * 3)


def a_sweep() -> tuple[Point, ...]:
    return tuple(
        point([card(rate, attainment, ttft), card(rate, attainment, 1.1 * ttft)], rate=rate, timeline=TIMELINE)
        for rate, attainment, ttft in ((1.0, 100.0, 100.0), (2.0, 98.0, 300.0), (3.0, 60.0, 2_500.0), (BURST_RATE_PER_S, 20.0, 5_000.0))
    )


def texts(drawn: figure.Figure) -> str:
    return "\n".join(
        text
        for axes in drawn.axes
        for text in (*axes.get_legend_handles_labels()[1], axes.get_ylabel(), axes.get_xlabel(), *(each.get_text() for each in axes.texts))
    )


def test_only_completed_answers_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer of four is right: nothing is drawn of the fast wrong ones."""
    rows = rows_for(0, 4)
    wrong = [structs.replace(row, outcome=outcome, ttft_ms=1.0, gaps_ms=[1.0]) for row, outcome in zip(rows[1:], OTHERS, strict=True)]
    seen: list[Distribution] = []
    monkeypatch.setattr("bench.report.pictures.draw_distributions", lambda ttft, itl: seen.extend([*ttft, *itl]) or figure.Figure())
    drawn = {name: each for name, _, each in pictures(result_file(a_sweep()[:1]), [rows[0], *wrong])}
    assert [each.values_ms for each in seen] == [(rows[0].ttft_ms,), (20.0, 25.0)]
    waits = next(line for axes in drawn["timeline-0"].axes for line in axes.lines if "first token" in str(line.get_label()))
    assert list(waits.get_ydata()) == [rows[0].ttft_ms]  # type: ignore[call-overload, arg-type]


def test_curves_mark_the_knee_and_the_target_and_leave_the_burst_out() -> None:
    curves = curves_of(a_sweep())
    drawn = draw_curves(curves, [Target("ttft_p95_ms", 2_000.0)])
    told = texts(drawn)
    assert "knee 2 req/s" in told and "target 2000 ms" in told and "goodput (req/s)" in told and "offered load (req/s)" in told
    assert max(x for line in drawn.axes[0].lines for x in line.get_xdata()) == 3.0  # type: ignore[union-attr]
    nothing = draw_curves([Curve("empty", ())])
    assert "no run knows goodput_per_s" in texts(nothing)


def test_workloads_have_curves_of_their_own_and_closed_loops_none() -> None:
    mixed = replace(FACTS, name="mix")
    closed = replace(point([card(0.5)]), load=Load(streams=4), workload=replace(FACTS, name="a"))
    measured = [closed, point([card(1.0)]), point([card(2.0)]), point([card(0.4)], facts=mixed)]
    assert [(curve.name, len(curve.points)) for curve in curves_of(measured)] == [("baseline, chat", 2), ("baseline, mix", 1)]
    assert [name_of(each, measured) for each in measured] == [
        "a, closed loop, 4 streams",
        "chat, 1 req/s",
        "chat, 2 req/s",
        "mix, 0.4 req/s",
    ]
    assert set(telling(measured)) <= {1, 2}
    assert len(telling([closed, closed])) == 2, "without an open loop a few are shown"


def test_a_timeline_shows_queue_sheds_load_and_memory() -> None:
    told = texts(draw_timeline(TIMELINE, rows_for(0, shed=4), 1_000.0))
    for words in (
        "queue time (server, mean)",
        "shed, by when due",
        "queue target 1000 ms",
        "running",
        "waiting",
        "KV blocks in use",
        "preempted",
    ):
        assert words in told
    bare = texts(draw_timeline(Timeline(), ()))
    assert "nothing was answered" in bare and "does not say" in bare and "shed" not in bare


def test_distributions_keep_their_largest_value() -> None:
    thinned = _distribution("x", [float(i) for i in range(10_000)])
    assert len(thinned.values_ms) == 400 and (thinned.values_ms[-1], thinned.shares[-1]) == (9_999.0, 1.0)
    assert thinned.values_ms[200] == pytest.approx(10_000 * thinned.shares[200], abs=2)
    assert "no samples" in texts(draw_distributions([Distribution("x", (), ())], [thinned]))


def test_steps_carry_their_change() -> None:
    drawn = draw_steps([Panel("Output", "tok/s", (Bar("static", (50.0,)), Bar("iteration", (95.0, 105.0))))], "ladder")
    assert "(+100 %)" in texts(drawn)
    assert [plain(value) for value in (0.0, 0.01234, 3.14159, 8263.0, 104_512.0)] == ["0", "0.0123", "3.14", "8,263", "104,512"]


def test_images_are_the_same_twice() -> None:
    bars = [Panel("Output", "tok/s", (Bar("static", (50.0,)),))]
    first, second = (figure.image(draw_steps(bars, "ladder"), "svg") for _ in range(2))
    assert first == second and first.startswith(b"<?xml")
    assert figure.image(draw_steps(bars, "ladder"), "png").startswith(b"\x89PNG")


def test_the_page_needs_nothing_else_and_escapes() -> None:
    evil = "<script>alert(1)</script>&\"'"
    page = render(evil, [Section(evil, [evil, evil + "\n", Grid((evil,), ((evil,),)), Picture(b"png", evil)])])
    assert "<script" not in page and page.count("&lt;script&gt;") == 8
    assert re.findall(r"(?:src|href)=\"?([a-z]*)", page) == ["data"] and "http://" not in page and "https://" not in page
    assert 'src="data:image/png;base64,cG5n"' in page and "default-src 'none'" in page


def test_no_picture_spells_a_word() -> None:
    """Base64 may put any letters between its two signs; what is said there is the same bytes."""
    spelt = base64.b64decode("/ABC+/ABC+/A")
    page = render("page", [Section("page", [Picture(spelt, "picture")])])
    (data,) = re.findall(r'base64,([^"]*)"', page)
    assert not re.search(r"\bABC\b", page) and re.search(r"\bABC\b", unquote(data))
    assert base64.b64decode(unquote(data)) == spelt


def test_markdown_escapes_what_would_break_the_table() -> None:
    assert markdown(Grid(("a", "b"), (("x|y", "1\n2"),))) == "| a | b |\n|---|---:|\n| x\\|y | 1 2 |\n"


def test_the_report_of_a_sweep(tmp_path: Path) -> None:
    rows = [row for i in range(2) for row in rows_for(i, shed=i)]
    details = {"texts": {"The choice": "choose this & more\n", "The knee": "no knee up to 9 req/s"}}
    source = write(Result("sweep-chat", {"seed": "0"}, points=a_sweep()[:2], details=details), tmp_path, rows)
    paths = write_report(source)
    names = [path.name.removeprefix(source.stem) for path in paths]
    assert names == [
        ".html",
        *(f"-{each}.{kind}" for each in ("curves", "distributions", "timeline-1") for kind in ("png", "svg")),
    ]
    page = paths[0].read_text()
    assert page.count("<img") == 3
    assert "The choice" in page and "choose this &amp; more" in page and "The knee is the highest load at which" in page
    assert "no knee up to 9 req/s" not in page, "what an earlier version wrote down is judged anew"
    for words in ("0123456789abcdef", "no bound shows", "commit", "TTFT p95, ms"):
        assert words in page, words


def test_signs_of_mathematics_in_a_name_are_drawn_as_they_are(tmp_path: Path) -> None:
    named = [replace(each, label="$x_{$") for each in a_sweep()[:2]]
    source = write(Result("sweep-chat", {}, points=tuple(named)), tmp_path, [row for i in range(2) for row in rows_for(i)])
    assert "$x_{$" in write_report(source)[0].read_text()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    source = write(Result("sweep-chat", {}, points=tuple(a_sweep()[:2])), tmp_path)
    with source.open("rb") as file:  # a readable result in a folder that takes no file
        there = Path(f"/proc/self/fd/{file.fileno()}")
        done = CliRunner().invoke(app, ["report", str(there)])
        console = PlainConsole(file=io.StringIO())
        assert report_too(there, console) == () and "no report can be written to /proc/self/fd" in console.file.getvalue()  # type: ignore[attr-defined]
    assert done.exit_code == 2 and "no report can be written to /proc/self/fd" in done.output


def test_a_result_without_points_is_refused(tmp_path: Path) -> None:
    source = write(Result("old", {}), tmp_path)
    with pytest.raises(ValueError, match="no measured points"):
        write_report(source)


def test_the_knee_the_load_above_it_and_the_burst_are_shown_over_time() -> None:
    assert telling(a_sweep()) == [1, 2, 3]
    assert telling(a_sweep()[:2]) == [1]
    assert telling([point([card()], label=f"step {i}") for i in range(5)]) == [0, 2, 4]


def test_a_single_point_has_no_curve() -> None:
    assert [name for name, _, _ in pictures(result_file([point([card()])]), rows_for(0))] == ["distributions", "timeline-0"]
