"""The drills' judgements: what they must find is planted, and what is in order must pass."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bench import golden, metrics_page
from bench.drills import bodies, failover, overload
from bench.drills.bodies import Body
from bench.drills.failover import Failover
from bench.drills.overload import Overload
from bench.drills.verdict import compare, first_difference, read_scores
from bench.golden import GoldenItem
from bench.mock_openai import Fault
from bench.record import Answer, Outcome, Refusal, RequestRecord
from bench.result import Metric
from tests.bench.mock_pair import StartPair


def scored(gaps: list[float]) -> bytes:
    tops = [{"a": -0.1, "b": -0.1 - gap} for gap in gaps]
    return msgspec.json.encode({"tokens": ["a"] * len(gaps), "token_logprobs": [-0.1] * len(gaps), "top_logprobs": tops, "text_offset": []})


def stream(ids: list[int], gaps: list[float], outcome: Outcome = Outcome.COMPLETED) -> RequestRecord:
    times = array("d", [i * 0.1 for i in range(1, len(ids) + 1)])
    counts = array("I", [1] * len(ids))
    return RequestRecord(
        0.0,
        chunk_times_s=times,
        chunk_tokens=counts,
        outcome=outcome,
        answer=Answer(token_ids={0: ids}, logprobs={0: [scored(gaps[:1]), scored(gaps[1:])]}),
    )


def failed(metrics: tuple[Metric, ...]) -> list[str]:
    return [metric.name for metric in metrics if metric.holds is False]


def test_scores_are_read_across_chunks() -> None:
    scores = read_scores([scored([0.5]), scored([0.25, 2.0])])
    assert scores.gaps_nat == pytest.approx((0.5, 0.25, 2.0))
    assert scores.logprobs == (-0.1, -0.1, -0.1)
    single = msgspec.json.encode({"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [None]})
    assert read_scores([single]).gaps_nat == (math.inf,)


def test_differences_are_excused_only_at_near_ties() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert compare(0, [1, 2, 3], [1, 2, 3], [9, 9, 9]) is None
    near, far, short = (
        compare(0, [1, 2, 3], [1, 7, 3], [9, 5e-4, 9]),
        compare(0, [1, 2, 3], [1, 7, 3], [9, 2e-3, 9]),
        compare(0, [1, 2], [1, 2, 2], [9, 9]),
    )
    assert near is not None and near.excused
    assert far is not None and not far.excused
    assert short is not None and not short.excused, "a token more is a token doubled, never a tie"


def judged(disturbed: RequestRecord, moved_after_s: float | None = 2.9) -> list[str]:
    undisturbed = stream([1, 2, 3], [1.0, 1.0, 1.0])
    found = failover.differences([undisturbed], [disturbed])
    outcome = Failover((undisturbed,), (disturbed,), found, moved_after_s, failover.silence_s(disturbed, 0.05), 1, 5.0)
    return failed(failover.report(outcome, "freeze", {}).metrics)


def test_failover_finds_lost_changed_doubled_and_slow() -> None:
    assert judged(stream([1, 2, 3], [1.0] * 3)) == []
    assert judged(stream([1, 2], [1.0] * 2, Outcome.ERROR)) == ["lost", "changed"]
    assert judged(stream([1, 9, 3], [1.0] * 3)) == ["changed"]
    assert judged(stream([1, 2, 2, 3], [1.0] * 4)) == ["changed", "doubled"]
    assert judged(stream([1, 2, 3], [1.0] * 3), 3.1) == ["moved_after"]
    assert judged(stream([1, 2, 3], [1.0] * 3), None) == ["moved_after"], "no move was seen: nothing is shown"


def test_silence_before_the_fault_does_not_count() -> None:
    record = stream([1, 2, 3, 4], [1.0] * 4)
    record.chunk_times_s = array("d", [5.0, 5.1, 5.4, 5.5])
    assert failover.silence_s(record, 5.05) == pytest.approx(0.3)


def refused(code: str, answer_s: float, retry_after_s: float | None = 1.0) -> RequestRecord:
    body = msgspec.json.encode({"error": {"message": "m", "code": code}})
    return RequestRecord(
        0.0,
        sent_s=0.0,
        first_byte_s=answer_s,
        end_s=answer_s,
        status=429,
        outcome=Outcome.SHED,
        refusal=Refusal(retry_after_s, 900.0, body),
    )


def overloaded(*records: RequestRecord, queue_time: dict[float, float] | None = None, ttft_s: float = 0.1) -> list[str]:
    served = [stream([1], [1.0]) for _ in range(8)]
    for record in served:
        record.chunk_times_s[0] = ttft_s
    page = metrics_page.MetricsPage({}, {metrics_page.QUEUE_TIME: queue_time} if queue_time else {})
    return failed(overload.report(Overload((*served, *records), page), {}).metrics)


def test_overload_finds_what_is_wrong() -> None:
    assert overloaded(refused("queue_time", 0.01)) == []
    assert overloaded(refused("queue_time", 0.2)) == ["refusal_at_arrival_p95"]
    assert overloaded(refused("queue_time_waited", 1.2)) == [], "who had a chance may wait"
    assert overloaded(refused("queue_time", 0.01, retry_after_s=None)) == ["without_retry_after"]
    assert overloaded(refused("queue_time", 0.01, retry_after_s=0.5)) == ["without_retry_after"]
    assert overloaded(stream([1], [1.0], Outcome.ERROR)) == ["neither_200_nor_429"]
    assert overloaded(queue_time={1.0: 4, 2.0: 10, 5.0: 10}) == []
    coarse: dict[float, float] = {1.0: 4, 2.0: 5, 5.0: 10}
    assert overloaded(queue_time=coarse, ttft_s=3.0) == ["queue_time_p95"]
    assert overloaded(queue_time=coarse, ttft_s=1.9) == [], "a first token within the SLO proves the wait was"
    assert overloaded(queue_time={1.0: 4, 2.0: 10}, ttft_s=3.0) == []
    known = Overload(tuple(stream([1], [1.0]) for _ in range(8)), metrics_page.MetricsPage({}, {metrics_page.QUEUE_TIME: coarse}))
    assert failed(overload.report(replace(known, waits_s=(1.0,) * 8), {}).metrics) == [], "what is known exactly is no bucket's edge"
    assert failed(overload.report(replace(known, waits_s=(1.0,) * 6 + (2.1,) * 2), {}).metrics) == ["queue_time_p95"]
    assert failed(overload.report(Overload((), metrics_page.MetricsPage({}, {})), {}).metrics) == ["served", "queue_time_p95"]


def test_metrics_page_sums_labels_and_takes_differences() -> None:
    text = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{r="a"} 2
vllm:num_requests_running{r="b"} 1
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{le="0.5"} 3
vllm:request_queue_time_seconds_bucket{le="+Inf"} 4
vllm:request_queue_time_seconds_count 4
vllm:request_queue_time_seconds_sum 9
"""
    page = metrics_page.parse(text)
    assert page.values[metrics_page.RUNNING] == 3
    assert page.quantile_bound(metrics_page.QUEUE_TIME, 0.75) == 0.5
    assert page.quantile_bound(metrics_page.QUEUE_TIME, 0.95) == math.inf
    assert page.quantile_bound("nothing", 0.5) is None
    assert page.since(page).quantile_bound(metrics_page.QUEUE_TIME, 0.5) is None


ITEM = GoldenItem(1, (5, 6), (7, 8), (-0.5, -0.25), (1.0, 2e-4, 1.0), "ab", ())


def golden_verdict(ids: list[int], logprobs: list[float | None], dtype: str) -> list[str]:
    generated = RequestRecord(0.0, outcome=Outcome.COMPLETED, answer=Answer(token_ids={0: ids}))
    part = msgspec.json.encode({"tokens": ["x"] * len(logprobs), "token_logprobs": logprobs})
    forced = RequestRecord(0.0, outcome=Outcome.COMPLETED, answer=Answer(logprobs={0: [part]}))
    return failed(golden.metrics_of([golden.judge(ITEM, frozenset({2}), generated, forced, None)], dtype))


def test_golden_bounds() -> None:
    exact: list[float | None] = [None, -3.0, -0.5, -0.25]
    assert golden_verdict([7, 8, 2], exact, "float32") == [], "the end token is not compared"
    assert golden_verdict([7, 9], exact, "float32") == [], "a near-tie"
    assert golden_verdict([9, 8], exact, "float32") == ["diverged_beyond_gap"]
    assert golden_verdict([7, 8, 4], exact, "float32") == ["diverged_beyond_gap"], "went on where it should have stopped"
    assert golden_verdict([7, 8], [None, -3.0, -0.6, -0.25], "float32") == ["mean_delta_log_p"]
    assert golden_verdict([7, 8], [None, -3.0, -0.6, -0.25], "bfloat16") == []
    assert golden_verdict([7, 8], [None, -3.0, -0.7, -0.25], "bfloat16") == ["mean_delta_log_p"]
    assert "not_scored" in golden_verdict([7, 8], [None, -3.0], "bfloat16")


def test_golden_file_is_cut_at_its_end_token() -> None:
    recorded = golden.load(Path(__file__).parents[1] / "end_to_end" / "golden_small.json")
    france = recorded.items[0]
    assert (france.text, len(france.ids), len(france.gaps_nat)) == ("The capital of France is Paris.", 7, 8)
    assert all(gap >= 0 for item in recorded.items for gap in item.gaps_nat)


async def test_bodies_drill_against_a_mock(pair: StartPair, tmp_path: Path) -> None:
    """The mock refuses what is not JSON with 400, and answers 200 to all the rest."""
    lines = [
        {"path": "/v1/completions", "body_raw": "{", "expect_status": [400]},
        {"path": "/v1/completions", "body_raw": '{"max_tokens": 2}', "expect_status": [200]},
        {"path": "/v1/completions", "body_gz_b64": "H4sIAAAAAAAC/6uuBQBDv6ajAgAAAA==", "expect_status": [400], "case": "packed"},
        {"path": "/v1/completions", "body_raw": "{", "expect_status": [400], "param": "prompt"},
    ]
    file = tmp_path / "bodies.jsonl"
    file.write_bytes(b"\n".join(msgspec.json.encode(line) for line in lines))
    mock = await pair()
    faults = await bodies.run(f"http://127.0.0.1:{mock.port}", bodies.load(file))
    assert [(fault.body, fault.text) for fault in faults] == [
        ("line 3 packed", "status 200, allowed 400"),
        ("line 4", "error.param None, expected 'prompt'"),
    ]
    await mock.server.close()
    dead = await bodies.run(f"http://127.0.0.1:{mock.port}", bodies.load(file)[:1])
    assert len(dead) == 2, "no answer, and the next request fails too"


async def test_bodies_drill_sees_a_server_that_stays_broken(pair: StartPair) -> None:
    mock = await pair(fault=Fault.SHED)
    faults = await bodies.run(f"http://127.0.0.1:{mock.port}", [Body("x", "/v1/completions", b"{", (400,), None)])
    assert [fault.text for fault in faults] == ["the next valid request: status 429, "]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bodies.jsonl"
    file.write_text('{"path": "/", "body_raw": "", "expect_status": [400]}\n{"path": 1}\n')
    with pytest.raises(ValueError, match="line 2"):
        bodies.load(file)


def test_overload_reads_the_waits_of_those_that_were_admitted() -> None:
    told = [
        {"verdict": "admitted", "actual": {"queue_time_s": 0.5}},
        {"verdict": "admitted", "actual": {"queue_time_s": None}},
        {"verdict": "admitted", "actual": None},
        {"verdict": "refused", "actual": None},
    ]
    assert overload.waits_s(told) == (0.5,)
