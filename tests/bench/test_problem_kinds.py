"""One line for each kind of fault, whatever the numbers in it."""

from __future__ import annotations

from bench.analysis.evidence import Evidence
from bench.analysis.number import short
from bench.load import Load
from bench.load_client import closed_loop
from bench.mock_openai import Fault, Pace
from bench.problem_kinds import LIKE, by_kind
from bench.prompt_style import PromptStyle
from bench.report.evidence_text import NOTHING, UNTOLD, lines
from bench.summary import summarize
from bench.works import Work, calls_of
from tests.bench.mock_pair import StartPair


def test_numbers_make_no_kind_but_a_status_does() -> None:
    counts = {"usage says 9 tokens, asked for 4": 2, "usage says 7 tokens, asked for 2": 1, "no usage": 1, "status 500": 1, "status 503": 1}
    grouped = {"usage says 9 tokens, asked for 4" + LIKE: 3, "no usage": 1, "status 500": 1, "status 503": 1}
    assert by_kind(counts) == grouped
    assert by_kind(grouped) == grouped, "runs that were grouped each are grouped once more"


async def test_a_server_that_miscounts_is_one_line(pair: StartPair) -> None:
    mock = await pair(pace=Pace(token_ms=0), fault=Fault.USAGE_TOO_HIGH)
    calls = [call for n in (4, 6, 8) for call in calls_of(Work("x", 1, 16, n, 1), PromptStyle("mock"), n)]
    records = await closed_loop(mock.client, calls, streams=1_000_000)
    problems = summarize(records).problems
    assert len(records) == 3 and list(problems.values()) == [3], problems


async def test_a_refusal_says_why(pair: StartPair) -> None:
    mock = await pair(fault=Fault.SHED)
    summary = summarize(await closed_loop(mock.client, calls_of(Work("x", 1, 16, 4, 2), PromptStyle("mock"), 0), streams=2))
    assert summary.shed == 2 and summary.refusal


def test_more_streams_than_requests_are_told() -> None:
    assert Load(streams=20_000).over(5) == "closed loop, 20000 streams (at most 5 at a time)"
    assert Load(streams=5).over(5) == "closed loop, 5 streams"


def test_a_server_without_metrics_leaves_only_the_client_to_judge() -> None:
    assert lines(Evidence(figures={"client_cpu_cores": 0.1}, requests=5))[-1] == UNTOLD
    assert lines(Evidence(figures={"client_cpu_cores": 0.1, "running_max": 3.0}, requests=5))[-1] == NOTHING


def test_a_huge_price_has_no_exponent() -> None:
    assert [short(value) for value in (1.5e9, 1234.0, 12.34, 1e-7)] == ["1,500,000,000", "1,234", "12.3", "1e-07"]
