"""Each rule of `explain` with evidence that must convince it and evidence that must not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.analysis import rules
from bench.analysis.evidence import Evidence, Moment
from bench.analysis.rules import Finding, explain

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
    finding = rules.chunk_budget(replace(CALM, ttft_by_prompt=long_slow))
    assert bound(finding) == "chunk budget" and "a step takes at most 512" in (finding.evidence if finding else "")
    assert rules.chunk_budget(replace(CALM, ttft_by_prompt=long_slow, budget_tokens=8_192)) is None  # no prompt is chunked
    assert rules.chunk_budget(with_figures(replace(CALM, ttft_by_prompt=long_slow), queue_p50_ms=1_500.0)) is None  # it is the queue
    level = tuple((100 + 100 * i, 300.0) for i in range(30))
    assert rules.chunk_budget(replace(CALM, ttft_by_prompt=level)) is None
    assert rules.chunk_budget(replace(CALM, ttft_by_prompt=long_slow[:5])) is None


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
