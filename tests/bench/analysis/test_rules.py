"""Each rule of `explain` with evidence that must convince it and evidence that must not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench.analysis import rules
from bench.analysis.at_load import AtLoad
from bench.analysis.evidence import Evidence, Moment
from bench.analysis.next_steps import next_steps
from bench.analysis.rules import Finding, explain
from bench.analysis.slo_verdict import verdict
from bench.report.evidence_text import lines
from bench.slo import Slo

CALM = Evidence(
    figures={
        "send_lag_p99_ms": 0.4,
        "client_cpu_cores": 0.1,
        "ttft_p50_ms": 200.0,
        "ttft_p95_ms": 400.0,
        "itl_p95_ms": 40.0,
        "queue_p50_ms": 5.0,
        "completed_per_s": 2.0,
        "preemptions": 0.0,
        "kv_use_max_percent": 30.0,
        "server_cpu_cores": 1.0,
    },
    requests=100,
    arriving=tuple(Moment(4.0, 0.0, 30.0) for _ in range(12)),
    ttft_by_prompt=tuple((100 + i, 200.0) for i in range(30)),
    sequences_max=8,
    budget_tokens=512,
    cores=2,
)


def with_figures(evidence: Evidence = CALM, **figures: float | None) -> Evidence:
    return replace(evidence, figures={**evidence.figures, **figures})


def growing(running: float, kv_percent: float, final: float = 22.0) -> Evidence:
    return replace(CALM, arriving=tuple(Moment(running, final * i / 11, kv_percent) for i in range(12)))


def bound(finding: Finding | None) -> str:
    return finding.bound if finding else ""


def test_a_calm_run_has_no_bound() -> None:
    assert explain(CALM) == ()
    assert explain(Evidence({}, 0)) == ()


def test_client_late() -> None:
    assert "120 ms late" in (rules.client_late(with_figures(send_lag_p99_ms=120.0)) or Finding("", "", "")).evidence
    assert bound(rules.client_late(with_figures(client_cpu_cores=0.97))) == "client"
    assert rules.client_late(with_figures(send_lag_p99_ms=120.0, ttft_p50_ms=5_000.0)) is None  # late, and it does not matter
    assert rules.client_late(CALM) is None


def test_failures_come_first_and_are_named() -> None:
    failed = replace(with_figures(error_percent=6.0, client_cpu_cores=0.97), problems={"no [DONE]": 1, "timeout": 5})
    first, second = explain(failed)
    assert (first.bound, second.bound) == ("failures", "client")
    assert first.evidence == "6 % of 100 requests failed; 5 × timeout; 1 × no [DONE]"
    assert rules.failures(with_figures(error_percent=0.5)) is None


def test_kv_pressure_by_preemptions() -> None:
    finding = rules.kv_pressure(with_figures(preemptions=7.0, kv_use_max_percent=99.0))
    assert finding is not None and finding.bound == "KV memory" and "7 preemptions in 100 requests" in finding.evidence
    assert rules.kv_pressure(with_figures(preemptions=1.0)) is None  # one in a hundred is no bound
    assert rules.kv_pressure(with_figures(preemptions=None)) is None


def test_kv_pressure_by_a_full_pool() -> None:
    assert bound(rules.kv_pressure(growing(4.0, 99.0))) == "KV memory"
    full_but_nobody_waits = replace(CALM, arriving=tuple(Moment(4.0, 0.0, 99.0) for _ in range(12)))
    assert rules.kv_pressure(full_but_nobody_waits) is None


@pytest.mark.parametrize(("cpu", "where"), [(1.95, "CPU"), (0.5, "network or client"), (None, "CPU, network or client")])
def test_idle_while_waiting(cpu: float | None, where: str) -> None:
    moments = (Moment(8.0, 1.0, 30.0), *(Moment(1.0, 5.0, 30.0) for _ in range(11)))
    assert bound(rules.idle_while_waiting(with_figures(replace(CALM, arriving=moments), server_cpu_cores=cpu))) == where
    busy = tuple(Moment(8.0, 5.0, 30.0) for _ in range(12))
    assert rules.idle_while_waiting(replace(CALM, arriving=busy)) is None
    full = tuple(replace(moment, kv_use_percent=99.0) for moment in moments)
    assert rules.idle_while_waiting(replace(CALM, arriving=full)) is None


def test_waiting_grows_while_memory_is_free() -> None:
    at_limit = rules.waiting_grows(growing(8.0, 40.0))
    assert bound(at_limit) == "sequence limit" and "all 8 sequences" in (at_limit.evidence if at_limit else "")
    assert bound(rules.waiting_grows(growing(4.0, 40.0))) == "token budget, tokenizer or client"
    assert rules.waiting_grows(growing(8.0, 90.0)) is None  # the memory is not free
    assert rules.waiting_grows(growing(8.0, 40.0, final=1.5)) is None  # it hardly grows
    assert rules.waiting_grows(replace(growing(8.0, 40.0), arriving=growing(8.0, 40.0).arriving[:4])) is None  # too few to tell


def test_chunk_budget() -> None:
    long_slow = tuple((100 + 100 * i, 100.0 + 60 * i) for i in range(30))
    finding = rules.prompts(replace(CALM, ttft_by_prompt=long_slow))
    assert bound(finding) == "chunk budget" and "a step takes at most 512" in (finding.evidence if finding else "")
    assert rules.prompts(replace(CALM, ttft_by_prompt=long_slow, budget_tokens=8_192)) is None  # no prompt is chunked
    assert rules.prompts(with_figures(replace(CALM, ttft_by_prompt=long_slow), queue_p50_ms=1_500.0)) is None  # it is the queue
    level = tuple((100 + 100 * i, 300.0) for i in range(30))
    assert rules.prompts(replace(CALM, ttft_by_prompt=level)) is None
    assert rules.prompts(replace(CALM, ttft_by_prompt=long_slow[:5])) is None


BROKEN = replace(
    with_figures(attainment_percent=60.0),
    requests=5,
    slo=Slo(ttft_ms=2_000.0),
    ttft_by_prompt=((3_500, 2_300.0), (74, 40.0), (300, 120.0), (122, 36.0)),
)


def test_few_answers_are_told_apart_by_the_target_they_missed() -> None:
    finding = rules.prompts(BROKEN)
    assert bound(finding) == "chunk budget" and "2300 ms with some 3500 new" in (finding.evidence if finding else "")
    alone = replace(BROKEN, arriving=(Moment(1.0, 0.0, 20.0), Moment(0.0, 0.0, 0.0), Moment(1.0, 0.0, 20.0)))
    assert bound(rules.prompts(alone)) == "prefill"
    assert rules.prompts(with_figures(BROKEN, attainment_percent=100.0)) is None, "the control: nothing was missed"


def test_long_steps_are_named_where_gaps_broke_and_not_first_tokens() -> None:
    slow = tuple((100 + 100 * i, 100.0 + 60 * i) for i in range(30))
    gaps = with_figures(replace(CALM, ttft_by_prompt=slow, late_gaps=(4, 30), slo=Slo(2_000.0, 200.0)), attainment_percent=86.0)
    gaps = with_figures(gaps, itl_p50_ms=15.0)
    (finding,) = explain(gaps)
    assert finding.bound == "prompts beside running answers" and "in 4 of 30 answers" in finding.evidence
    assert rules.long_steps(with_figures(gaps, itl_p50_ms=90.0)) is None, "all steps are long"
    assert rules.long_steps(replace(gaps, late_gaps=(1, 30))) is None
    late = explain(replace(gaps, slo=Slo(1_000.0, 200.0)))
    assert [each.bound for each in late] == ["prompts beside running answers", "chunk budget"], "the control: first tokens are late too"


def test_kv_pressure_by_requests_that_do_not_fit() -> None:
    held = replace(CALM, arriving=tuple(Moment(6.0, 3.0, 84.0) for _ in range(12)))
    finding = rules.kv_pressure(held)
    assert bound(finding) == "KV memory" and "84 % of the KV pool was in use by 6.0 running" in (finding.evidence if finding else "")
    assert rules.kv_pressure(replace(CALM, arriving=tuple(Moment(60.0, 3.0, 84.0) for _ in range(12)))) is None, "small ones fit"


def burst(evidence: Evidence) -> Evidence:
    return replace(evidence, load=AtLoad(math.inf, (evidence.figures,)), calmer={})


def test_a_burst_is_no_rate() -> None:
    crowd = with_figures(growing(8.0, 40.0), attainment_percent=20.0, waiting_max=92.0, shed_percent=10.0, offered_per_s=None)
    crowd = replace(crowd, slo=Slo(ttft_ms=300.0), calmer={"completed_per_s": 1.5, "ttft_p95_ms": 150.0})
    assert [finding.bound for finding in explain(burst(crowd))] == ["queue of the burst"]
    (finding,) = explain(burst(crowd))
    assert "100 requests at once are 50 s of work" in finding.evidence and "up to 92 waited" in finding.evidence
    assert [finding.bound for finding in explain(with_figures(crowd, offered_per_s=4.0))] == [
        "sequence limit",
        "admission",
        "load above what is served in time",
    ], "the control: the same at a rate"
    assert explain(burst(with_figures(crowd, attainment_percent=99.0, shed_percent=0.0))) == (), "a burst that is kept"
    level = replace(with_figures(crowd, waiting_max=None, ttft_p95_ms=360.0), ttft_by_prompt=tuple((100, 350.0) for _ in range(100)))
    assert explain(burst(level)) == (), "all came as soon as the first: nobody queued"
    assert [each.bound for each in explain(burst(with_figures(level, ttft_p95_ms=3_600.0)))] == ["queue of the burst"]


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        (BROKEN, "SLO broken: 60 % of the requests within it, 95 % are needed. Late first tokens: 1 of 4 answers"),
        (with_figures(BROKEN, ttft_p95_ms=2_300.0), "SLO broken: TTFT p95 2300 ms > 2000 ms; 60 %"),
        (with_figures(BROKEN, shed_percent=20.0, kv_use_max_percent=92.8, waiting_max=6.0), "20.0 % shed; 60 %"),
        (with_figures(BROKEN, shed_percent=20.0, kv_use_max_percent=92.8), "While 20 % were refused, at most 92.8 % of the KV pool"),
        (replace(BROKEN, late_gaps=(3, 5)), "Gaps above the target: in 3 of 5 answers"),
        (with_figures(BROKEN, attainment_percent=100.0), "SLO kept: 100 % of the requests within it"),
        (with_figures(BROKEN, attainment_percent=97.0, shed_percent=3.0), "SLO kept: 97 % of the requests within it; yet 3.0 % shed"),
        (replace(with_figures(BROKEN, error_percent=5.0), slo=Slo()), "no SLO was given; 5.0 % failed"),
        (with_figures(BROKEN, attainment_percent=None), "no request can be judged"),
    ],
)
def test_what_broke_is_always_named(evidence: Evidence, said: str) -> None:
    assert said in verdict(evidence)


def test_a_broken_slo_has_a_bound_or_a_next_measurement() -> None:
    level = tuple((100, 2_100.0) for _ in range(5))
    unknown = replace(BROKEN, arriving=(), ttft_by_prompt=level, late_gaps=(2, 5))
    told = lines(unknown)
    assert told[0].startswith("SLO broken") and told[1].startswith("no bound is seen. Measure next: the server's own figures")
    for words in ("of 5 a p95 is the slowest", "at a lower load", "--streams 1", "max_num_batched_tokens"):
        assert words in told[1]
    assert len(next_steps(replace(BROKEN, requests=100, ttft_by_prompt=(), calmer={"ttft_p95_ms": 1.0}))) == 1
    assert "likely bound" in lines(BROKEN)[1] and lines(CALM)[1].startswith("no bound shows")


def test_admission() -> None:
    calmer = {"completed_per_s": 1.5, "ttft_p95_ms": 150.0, "itl_p95_ms": 38.0}
    finding = rules.admission(replace(CALM, calmer=calmer))
    assert finding is not None and "1.50 → 2.00 responses/s, but TTFT p95 150 → 400 ms" in finding.evidence
    assert rules.admission(replace(CALM, calmer={**calmer, "ttft_p95_ms": 390.0})) is None  # more, and not worse
    assert rules.admission(replace(CALM, calmer={**calmer, "completed_per_s": 2.0})) is None  # worse, but not more
    assert rules.admission(CALM) is None


def test_compute() -> None:
    assert bound(rules.compute(with_figures(server_cpu_cores=1.9))) == "compute"
    assert rules.compute(with_figures(server_cpu_cores=1.2)) is None
    assert rules.compute(replace(with_figures(server_cpu_cores=1.9), cores=None)) is None


def test_what_makes_the_rest_doubtful_comes_first() -> None:
    everything = with_figures(growing(8.0, 40.0), client_cpu_cores=0.99, preemptions=50.0, server_cpu_cores=1.95)
    assert [finding.bound for finding in explain(everything)] == ["client", "KV memory", "sequence limit", "compute"]


def test_an_slo_kept_for_a_moment_is_doubted() -> None:
    figures = {**CALM.figures, "attainment_percent": 100.0, "e2e_p95_ms": 8_740.0}
    asked = replace(CALM, figures=figures, slo=Slo(ttft_ms=2_000))
    brief, long = (replace(asked, load=AtLoad(4.0, (figures,), requests=count)) for count in (8, 80))
    assert verdict(brief).startswith("SLO kept: 100 % of the requests within it; yet not a steady load: its requests were due within 1.8 s")
    assert verdict(long) == "SLO kept: 100 % of the requests within it", "the control"
