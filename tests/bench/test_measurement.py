"""From a served mock to a point: what is right counts, what is wrong is counted, and nothing lends a figure what it has not earned."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench import measurement, run_command
from bench.load import Load
from bench.load_client import Call, LoadClient
from bench.measurement import Question, Run, measure, scorecard
from bench.mock_openai import Fault, Pace
from bench.point import spread_of
from bench.prompt_style import PromptStyle
from bench.quantiles import Spread
from bench.record import Counts, Outcome, RequestRecord
from bench.result import Result, load_requests, load_result, write
from bench.scorecard import ServerSide, figure, figures_of
from bench.server import Server
from bench.slo import Slo
from bench.workload import Workload
from bench.workloads import workload
from tests.bench.mock_pair import StartMock

SMALL = Workload("small", 0, "a few", workload("agent", 0, 12).calls)


def at(url: str, timeout_s: float = 20.0) -> Server:
    return Server(url, PromptStyle("mock"), timeout_s=timeout_s)


def test_a_good_server_gets_all_it_earned(mock_url: StartMock) -> None:
    calm = Workload("calm", 0, "", workload("chat", 0, 12).calls)
    asked = Question(calm, Load(rate_per_s=60.0), Slo(ttft_ms=5_000), repeats=2, price_per_hour=36.0)
    measured = measure(at(mock_url(Pace(token_ms=1))), asked, index=3)
    point = measured.point
    assert [repeat.scorecard.summary.completed for repeat in point.repeats] == [12, 12]
    card = point.repeats[0].scorecard
    assert card.goodput.accepted == 12 and card.goodput.attainment_percent == 100
    assert card.summary.output_tokens == sum(call.output_tokens for call in calm)
    assert card.offered_per_s == pytest.approx(60.0, rel=0.35)
    assert card.cost.per_accepted == pytest.approx(36.0 * card.summary.duration_s / 3600 / 12)
    assert {(row.point, row.repeat) for row in measured.rows} == {(3, 0), (3, 1)}
    assert len(measured.rows) == 24 and all(row.accepted and row.group == "chat" for row in measured.rows)
    assert point.figure("queue_p95_ms") is None, "a server without metrics says nothing, which is not 0"
    assert point.figure("preemptions") is None and point.figure("kv_use_max_percent") is None


@pytest.mark.parametrize(
    "fault",
    [
        Fault.HANG_AT_ONCE,
        Fault.HANG_MIDWAY,
        Fault.DROP_MIDWAY,
        Fault.NONSENSE,
        Fault.USAGE_TOO_HIGH,
        Fault.USAGE_TOO_LOW,
        Fault.NO_DONE,
        Fault.ENDLESS,
        Fault.BAD_HTTP,
    ],
)
def test_a_bad_server_is_counted_and_never_averaged(mock_url: StartMock, fault: Fault) -> None:
    asked = Question(Workload("w", 0, "", workload("chat", 0, 4).calls), Load(streams=4), Slo())
    card = measure(at(mock_url(Pace(token_ms=1), fault), timeout_s=0.6), asked).point.repeats[0].scorecard
    assert (card.summary.requests, card.summary.completed, card.summary.errors) == (4, 0, 4)
    assert card.summary.problems, "and it says why"
    assert (card.goodput.accepted, card.goodput.tokens_per_s, card.summary.output_tokens_per_s) == (0, 0.0, 0.0)
    assert card.figure("error_percent") == 100
    assert card.figure("ttft_p50_ms") is None and card.cost.per_accepted is None


def test_cancelled_requests_are_neither_good_nor_bad(mock_url: StartMock) -> None:
    calls = [call for call in workload("agent", 0, 60).calls if call.cancel_after_s is not None][:3]
    asked = Question(Workload("w", 0, "", tuple(calls)), Load(streams=3), Slo())
    card = measure(at(mock_url(Pace(first_ms=2_500))), asked).point.repeats[0].scorecard
    assert (card.summary.cancelled, card.summary.errors, card.goodput.attainment_percent) == (3, 0, None)


def record(ttft_s: float, gap_s: float = 0.01, outcome: Outcome = Outcome.COMPLETED, due_s: float = 0.0) -> RequestRecord:
    times = array("d", [due_s + ttft_s + i * gap_s for i in range(10)])
    return RequestRecord(
        due_s, due_s, due_s, times[-1], times, array("I", [1] * 10), 200, outcome, counts=Counts(prompt_tokens=5, completion_tokens=10)
    )


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (Slo(), True),
        (Slo(ttft_ms=500), True),
        (Slo(ttft_ms=499), False),
        (Slo(itl_p95_ms=21), True),
        (Slo(itl_p95_ms=19), False),
        (Slo(tpot_ms=19), False),
        (Slo(e2e_ms=681), True),
        (Slo(e2e_ms=600), False),
        (Slo(ttft_ms=600, e2e_ms=600), False),
    ],
)
def test_slo_keeps_what_is_in_time(slo: Slo, kept: bool) -> None:
    assert slo.kept_by(record(0.5, 0.02)) is kept
    assert not slo.kept_by(record(0.5, 0.02, Outcome.WRONG)), "a wrong answer is never good, however fast"


def test_a_later_point_finds_no_prefix_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch, mock_url: StartMock) -> None:
    sent: list[bytes] = []
    offer = measurement.closed_loop

    async def noted(client: LoadClient, calls: Sequence[Call], *, streams: int) -> list[RequestRecord]:
        sent.extend(call.body for call in calls)
        return await offer(client, calls, streams=streams)

    monkeypatch.setattr(measurement, "closed_loop", noted)
    server, asked = at(mock_url()), Question(Workload("w", 0, "", workload("chat", 0, 3).calls), Load(streams=1), salt="x")
    for index in (0, 1, 1):
        measure(server, asked, index=index)
    first, second, again = sent[:6], sent[6:12], sent[12:]
    assert not set(first) & set(second)
    assert second == again, "the control: the same point under the same salt is the same text"


def test_a_first_token_that_never_came_is_late() -> None:
    silent = RequestRecord(0.0, 0.0, 0.0, 0.1, status=200, outcome=Outcome.COMPLETED)
    assert not Slo(ttft_ms=500).kept_by(silent)
    assert Slo(itl_p95_ms=500, tpot_ms=500, e2e_ms=500).kept_by(silent), "the control: no gaps are no long gaps"


def test_goodput_counts_only_what_kept_the_slo() -> None:
    records = (record(0.1), record(0.9, due_s=1.0), record(0.1, outcome=Outcome.ERROR, due_s=2.0), record(0.1, due_s=3.0))
    run = Run(records, 0.0, ServerSide(queue_ms=Spread(10.0, 80.0, 90.0)))
    asked = Question(SMALL, Load(rate_per_s=1.0), Slo(ttft_ms=200, queue_ms=70), price_per_hour=3.6)
    card = scorecard(run, asked, replicas=2)
    assert card.offered_per_s == 1.0
    at_once = scorecard(replace(run, records=(record(0.1), record(0.2))), asked, replicas=1)
    assert at_once.offered_per_s is None and "offered_per_s" not in spread_of([at_once]), "a burst has no rate"
    assert (card.summary.completed, card.goodput.accepted, card.goodput.attainment_percent) == (3, 2, 50.0)
    assert card.goodput.tokens_per_s == pytest.approx(20 / card.summary.duration_s, rel=0.01)
    assert card.goodput.queue_kept is False
    assert card.cost.per_accepted == pytest.approx(3.6 * 2 * card.summary.duration_s / 3600 / 2)


def test_figures_have_one_name_each_and_the_unknown_gets_the_list() -> None:
    card = scorecard(Run((record(0.1),), 0.0), Question(SMALL, Load(streams=1)), 1)
    assert figures_of(card)["ttft_p50_ms"] == pytest.approx(100.0)
    with pytest.raises(ValueError, match=r"unknown metric 'ttft'; there are offered_per_s, .*cost_per_accepted"):
        figure("ttft")
    assert "queue_p95_ms" not in spread_of([card]), "what no run has is absent"
    other = scorecard(Run((record(0.3),), 0.0), Question(SMALL, Load(streams=1)), 1)
    spread = spread_of([card, other, card])["ttft_p50_ms"]
    assert (spread.least, spread.median, spread.most, spread.runs) == (100.0, 100.0, 300.0, 3)


def test_a_result_is_read_as_it_was_written(mock_url: StartMock, tmp_path: Path) -> None:
    measured = measure(at(mock_url()), Question(SMALL, Load(rate_per_s=200.0), Slo(ttft_ms=1_000)))
    path, table, lines, requests = run_command.write(Result("unit", {}, points=(measured.point,)), [measured], tmp_path)
    found = load_result(path)
    assert found.schema == 2 and found.points == (measured.point,)
    assert load_requests(path) == list(measured.rows) and requests.name == found.requests_file
    assert "| goodput, req/s |" in table.read_text()
    head, first = lines.read_text().splitlines()
    assert head.startswith("label,workload,workload_hash,") and len(first.split(",")) >= len(
        figures_of(measured.point.repeats[0].scorecard)
    )


def test_a_long_name_is_cut_where_it_becomes_a_file(tmp_path: Path) -> None:
    path = write(Result("run-" + "ä" * 300, {}), tmp_path)
    assert load_result(path).name == "run-" + "ä" * 300 and path.name.startswith("run-ää")
    assert write(Result("run-chat", {}), tmp_path).name.startswith("run-chat-2"), "the control: others are whole"


def test_what_is_no_result_says_so(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for text, why in (("{", "no result file"), ('{"schema": 1}', "no result file"), ("[]", "no result file")):
        path.write_text(text)
        with pytest.raises(ValueError, match=why):
            load_result(path)
    with pytest.raises(ValueError, match="No such file"):
        load_result(tmp_path / "none.json")
    path.write_text('{"schema": 9, "date": "", "commit": "", "command": "", "machine": {}, "name": "", "configuration": {}}')
    with pytest.raises(ValueError, match="schema 9"):
        load_result(path)


def test_every_result_of_the_project_is_readable() -> None:
    paths = sorted((Path(run_command.__file__).parent / "results").glob("*.json"))
    assert paths and all(load_result(path).schema in (1, 2) for path in paths)


@pytest.mark.parametrize("took_s", [0.0004, 0.0014, 1.00049])
def test_goodput_is_never_above_what_was_completed(took_s: float) -> None:
    records = [RequestRecord(scheduled_s=0.0, sent_s=0.0, end_s=took_s, outcome=Outcome.COMPLETED) for _ in range(3)]
    card = scorecard(Run(tuple(records), 0.0), Question(Workload("w", 0, "", ()), Load(streams=1)), 1)
    assert card.goodput.requests_per_s == card.summary.completed_per_s > 0
