"""What the rules are given of a result: the run's own samples and requests, and only limits that are known."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from bench.analysis.evidence import evidence_of
from bench.load import Load
from bench.point import Point, Served
from bench.record import Outcome
from bench.slo import Slo
from bench.timeline import Timeline
from replica.config import EngineConfig
from tests.bench.made_up_results import card, point, rows_for

OTHERS = (Outcome.WRONG, Outcome.ERROR, Outcome.CANCELLED)
TIMELINE = Timeline((0.0, 5.0, 19.0, 40.0), (1, 2, 3, 0), (0, 1, None, 0), (10, 20, 30, 0))


def two_loads() -> tuple[Point, ...]:
    return point([card(ttft_ms=50.0)], rate=1.0), point([card(ttft_ms=500.0)], rate=2.0, timeline=TIMELINE)


def test_samples_while_requests_arrive_and_are_complete() -> None:
    points = two_loads()
    evidence = evidence_of(points, 1, [*rows_for(0), *rows_for(1)], cores=2)
    assert [moment.running for moment in evidence.arriving] == [1, 2]  # one lacks its waiting, the last came after the last request
    assert len(evidence.ttft_by_prompt) == 20
    assert evidence.calmer["ttft_p95_ms"] == 50.0 and evidence.figure("ttft_p95_ms") == 500.0
    assert evidence_of(points, 0, []).calmer == {}


def test_of_a_burst_all_samples_until_its_last_answer_count_and_no_lower_load_does() -> None:
    calm, loaded = two_loads()
    late = [structs.replace(row, due_ms=0.0, e2e_ms=20_000.0, gaps_ms=[500.0]) for row in rows_for(1)]
    at_once = replace(loaded, load=Load(rate_per_s=20_000.0), slo=Slo(ttft_ms=100.0, itl_p95_ms=100.0))
    found = evidence_of((calm, at_once), 1, late)
    assert [moment.running for moment in found.arriving] == [1, 2] and found.at_once and found.calmer == {}
    assert found.late_gaps == (20, 20) and len(found.late_prompts) == 19
    rate = evidence_of((calm, replace(at_once, load=Load(rate_per_s=2.0))), 1, late)
    assert [moment.running for moment in rate.arriving] == [1] and rate.calmer and not rate.at_once, "the control"


def test_only_completed_answers_are_evidence() -> None:
    rows = rows_for(1, 4)
    rows[1:] = [structs.replace(row, outcome=outcome) for row, outcome in zip(rows[1:], OTHERS, strict=True)]
    assert [pair[1] for pair in evidence_of(two_loads(), 1, rows).ttft_by_prompt] == [rows[0].ttft_ms]


def test_limits_are_those_given_or_ours() -> None:
    points = two_loads()
    default = EngineConfig.model_fields["max_num_seqs"].default
    assert evidence_of(points, 0, []).sequences_max == default
    ours = Served("rantang", "", "rantang serve", {"max_num_seqs": "8"}, 2)
    assert evidence_of([replace(points[0], served=ours)], 0, []).sequences_max == 16
    another = Served("vllm", "", "a running server")
    assert evidence_of([replace(points[0], served=another)], 0, []).sequences_max is None
    assert evidence_of([replace(points[0], served=another)], 0, []).budget_tokens is None


def test_another_configuration_is_not_the_calmer_one() -> None:
    one, two = two_loads()
    other = replace(one, served=Served("rantang", "", "rantang serve", {"max_num_seqs": "8"}))
    assert evidence_of([other, two], 1, []).calmer == {}
