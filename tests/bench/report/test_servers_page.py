"""The page of servers side by side: from a result made up, looked at by what is in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.peers.comparison import Column, metrics_of, result_of
from bench.result import Result, WorkResult, load_result, write
from bench.works import WORKS, Work
from tests.bench.made_up_results import card

pytest.importorskip("matplotlib")
from bench.report.document import write_report
from bench.report.servers import draw_servers

CHAT, LONG = (next(work for work in WORKS if work.name == name) for name in "be")


def column(name: str, rate: float, *, lost: int = 0, skipped: str = "") -> Column:
    def done(work: Work) -> WorkResult:
        summary = card(rate, ttft_ms=1_000 / rate).summary
        return WorkResult(work.name, work.description, replace(summary, completed=summary.requests - lost))

    works = () if skipped else (done(CHAT), done(LONG))
    return Column(name, f"{name} 1.0", f"{name} serve <model>", start_s=3.0, idle_mib=100.0, loaded_mib=120.0, works=works, skipped=skipped)


def written(folder: Path) -> Path:
    columns = [
        column("ours", 2.0),
        column("one", 1.0),
        column("two", 3.0, lost=4),
        column("gone", 1.0, skipped="not installed"),
        column("ours again", 2.2),
    ]
    return write(result_of(columns, ["ours"], [CHAT, LONG], {"seed": "0"}), folder)


def test_every_server_has_its_figures_ratios_and_command(tmp_path: Path) -> None:
    source = written(tmp_path)
    paths = write_report(source)
    assert {path.suffix for path in paths} == {".html", ".png", ".svg"}
    page = source.with_suffix(".html").read_text()
    for text in (
        "one 1.0",
        "two serve &lt;model&gt;",
        "not installed",
        "ours/one.b",
        "16/20",
        "ours.drift.b",
        CHAT.description,
        LONG.description,
    ):
        assert text in page, text
    assert "<model>" not in page, "every text is escaped"


def test_bars_are_of_what_is_compared_and_failures_are_said(tmp_path: Path) -> None:
    chat, long = draw_servers(load_result(written(tmp_path))).axes
    assert [tick.get_text() for tick in chat.get_yticklabels()] == ["ours", "one", "two"]
    assert [bar.get_width() for bar in chat.patches] == [20.0, 10.0, 30.0]  # type: ignore[attr-defined]
    assert [bar.get_width() for bar in long.patches] == [250.0, 500.0, pytest.approx(500 / 3)]  # type: ignore[attr-defined]
    assert "4 of 20 failed" in " ".join(text.get_text() for text in chat.texts)


def test_another_result_without_points_is_refused(tmp_path: Path) -> None:
    columns = [column("ours", 2.0)]
    other = Result("other", {}, (), metrics_of(columns, ["ours"], [CHAT]))
    with pytest.raises(ValueError, match="holds no measured points"):
        write_report(write(other, tmp_path))
