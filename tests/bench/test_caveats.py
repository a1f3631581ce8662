"""What must be known of a measurement stands before its figures, on the screen, in the table and on the page."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from bench import scorecard_table
from bench.caveats import caveats
from bench.point import Point
from bench.quantiles import Spread
from bench.report.document import sections
from bench.scorecard import Scorecard
from tests.bench.made_up_results import FACTS, card, point, result_file


def late(lag_ms: float, ttft_ms: float = 100.0) -> Scorecard:
    one = card(ttft_ms=ttft_ms)
    latencies = replace(one.summary.latencies, send_lag_ms=Spread(lag_ms, lag_ms, lag_ms))
    return replace(one, summary=replace(one.summary, latencies=latencies))


def slow(answer_s: float, rate: float = 1.0) -> Scorecard:
    one = card(rate=rate)
    spread = Spread(*[answer_s * 1e3] * 3)
    return replace(one, summary=replace(one.summary, latencies=replace(one.summary.latencies, e2e_ms=spread)))


def failing(count: int, label: str = "baseline", workload: str = "chat") -> Point:
    one = card()
    broken = replace(one, summary=replace(one.summary, errors=count, problems={"timeout": count}))
    return point([broken], label=label, facts=replace(FACTS, name=workload))


@pytest.mark.parametrize(
    ("lag_ms", "ttft_ms", "said"), [(15_600.0, 8_000.0, True), (30.0, 100.0, True), (30.0, 900.0, False), (3.0, 9.0, False)]
)
def test_a_late_client_is_said_where_it_matters(lag_ms: float, ttft_ms: float, said: bool) -> None:
    lines = caveats([point([late(lag_ms, ttft_ms)])])
    assert any(f"the client sent up to {lag_ms:.0f} ms late" in line for line in lines) is said


def test_one_late_run_of_three_is_said() -> None:
    (line,) = caveats([point([card(), late(500.0), card()])])
    assert "500 ms late (p99) in 1 of 3 runs" in line, "the median of the runs would hide it"


def test_a_rate_that_was_offered_too_briefly_is_no_steady_load() -> None:
    (line,) = caveats([point([slow(12.0)])])
    assert line.startswith("baseline, 1 req/s: not a steady load: its requests were due within 19 s, and an answer takes up to 12 s")
    assert "30 requests or more would tell" in line
    assert not caveats([point([slow(9.0)])]), "the control: two answers long"
    assert not caveats([point([replace(slow(12.0), goodput=replace(card().goodput, attainment_percent=50.0))])]), "it broke: that is told"
    assert not caveats([replace(point([slow(12.0)]), load=replace(point([card()]).load, rate_per_s=None, streams=4))]), "no rate"


def test_every_line_names_its_point() -> None:
    one, other = failing(3), failing(4, workload="agent")
    assert caveats([one]) == ["baseline, 1 req/s: 3 × timeout"]
    assert caveats([one, other]) == ["baseline, chat: 3 × timeout", "baseline, agent: 4 × timeout"]


def test_it_stands_before_the_figures_everywhere() -> None:
    bad = failing(3)
    out = StringIO()
    scorecard_table.show([bad], Console(file=out, width=160))
    for text in (out.getvalue(), scorecard_table.markdown([bad])):
        assert 0 <= text.index("3 × timeout") < text.index("TTFT p50")
    came = next(section for section in sections(result_file([bad]), [], []) if section.title == "What came of it")
    assert came.blocks[0] == "baseline, 1 req/s: 3 × timeout"
    assert "×" not in scorecard_table.markdown([point([card()])]), "the control: nothing to say is not said"
