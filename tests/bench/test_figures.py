"""Quantiles, arrivals, prompts, results: the pure parts of the benchmark."""

from __future__ import annotations

import json
import os
import statistics
import sys
from array import array
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import processes, result
from bench.arrivals import evenly, poisson
from bench.client_limits import added_s, steady_rate
from bench.mock_openai import STAMP_RANGE_US
from bench.prompt_style import PromptStyle
from bench.quantiles import quantile
from bench.record import Answer, Counts, Outcome, RequestRecord
from bench.result import Result, WorkResult
from bench.summary import summarize
from bench.works import WORKS, Work, calls_of


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_quantile_is_the_least_value_that_covers(values: list[float], q: float) -> None:
    found = quantile(values, q)
    assert found in values
    assert sum(value <= found for value in values) >= q * len(values) - 1e-9
    assert sum(value < found for value in values) < q * len(values) + 1e-9


def test_quantile_of_nothing() -> None:
    assert quantile([], 0.5) is None


def test_text_is_held_against_what_was_meant() -> None:
    """The old prompts, cut for four tokens a word, were seen as 179 tokens where 128 were meant."""
    seen = [RequestRecord(0.0, outcome=Outcome.COMPLETED, counts=Counts(n, 4, text_tokens=128)) for n in (179, 128)]
    assert summarize(seen).text_off_percent == pytest.approx(100 * (307 / 256 - 1), abs=0.01)
    assert summarize([RequestRecord(0.0, outcome=Outcome.COMPLETED, counts=Counts(100, 4))]).text_off_percent is None


def test_summary_of_known_times() -> None:
    record = RequestRecord(
        scheduled_s=10.0,
        sent_s=10.1,
        first_byte_s=10.4,
        end_s=12.0,
        chunk_times_s=array("d", [10.5, 11.0, 12.0]),
        chunk_tokens=array("I", [1, 2, 1]),
        outcome=Outcome.COMPLETED,
        counts=Counts(prompt_tokens=100, completion_tokens=4, cached_tokens=40),
    )
    s = summarize([record])
    times = s.latencies
    assert (times.ttft_ms.p50, times.itl_ms.p50, times.itl_ms.p95) == (500.0, 500.0, 1000.0)
    assert (times.tpot_ms.p50, times.e2e_ms.p99, times.refusal_ms.p50) == (500.0, 2000.0, None)
    assert (s.duration_s, s.completed_per_s, s.output_tokens_per_s) == (2.0, 0.5, 2.0)
    assert s.prefix_hit_percent == 40.0
    assert times.send_lag_ms.p99 == pytest.approx(100.0)


def test_summary_of_nothing_divides_by_nothing() -> None:
    assert summarize([]).output_tokens_per_s == 0.0


def test_what_the_client_adds_is_told_from_stamps_even_where_they_wrap() -> None:
    sent_us = [1_000, STAMP_RANGE_US - 100, 300]
    read_s = [0.0012, (STAMP_RANGE_US + 50) / 1e6, (2 * STAMP_RANGE_US + 290) / 1e6]
    record = RequestRecord(0.0, chunk_times_s=array("d", read_s), answer=Answer(token_ids={0: sent_us}))
    assert added_s(record) == pytest.approx([2e-4, 1.5e-4, -1e-5], abs=1e-9)
    assert added_s(RequestRecord(0.0)) == []


def test_the_steady_rate_leaves_out_both_ends() -> None:
    times = [0.0, *(1 + i / 100 for i in range(200)), 4.0]
    assert steady_rate([RequestRecord(0.0, chunk_times_s=array("d", times))]) == pytest.approx(100.0)
    assert steady_rate([]) == 0.0


def test_poisson_is_seeded_ascending_and_has_its_rate() -> None:
    times = poisson(50.0, 4000, seed=3)
    assert times == poisson(50.0, 4000, seed=3) != poisson(50.0, 4000, seed=4)
    gaps = [b - a for a, b in zip((0.0, *times), times, strict=False)]
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.1)  # exponential: as wide as its mean
    assert evenly(10.0, 3) == (0.0, 0.1, 0.2)
    with pytest.raises(ValueError, match="positive"):
        poisson(0.0, 1, 0)


def prompt_of(body: bytes) -> list[int]:
    prompt = msgspec.json.decode(body)["prompt"]
    assert isinstance(prompt, list)
    return prompt


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_works_have_their_lengths_and_share_what_they_say(work: Work) -> None:
    prompts = [prompt_of(call.body) for call in calls_of(work, PromptStyle("m"), 0)]
    assert {len(prompt) for prompt in prompts} == {work.shared_tokens + work.prompt_tokens}
    assert len({tuple(prompt[: work.shared_tokens]) for prompt in prompts}) == 1
    assert len({tuple(prompt[work.shared_tokens : work.shared_tokens + 16]) for prompt in prompts}) == work.requests
    assert [call.body for call in calls_of(work, PromptStyle("m"), 0)] == [call.body for call in calls_of(work, PromptStyle("m"), 0)]
    other = prompt_of(calls_of(work, PromptStyle("m"), 1)[0].body)
    assert other[:16] != prompts[0][:16], "another seed must not hit the first one's cache"


def test_result_file_names_no_host_and_no_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = str(result.ROOT / "bench" / "golden.py")
    arguments = [
        "http://gpu7.example.org:8000",
        "/secret/place/golden.json",
        "--works",
        "a b",
        "--api-key",
        "sesame",
        "--set=model=/secret/m",
    ]
    monkeypatch.setattr(sys, "argv", [module, *arguments, "--workload=chat,/secret/t.jsonl", "--api-key=sesame"])
    outcome = Result("unit", {"serve": "x"}, (WorkResult("a", "d", summarize([])),), (result.at_most("m", 3.0, 2.0, "s"),))
    path = result.write(outcome, tmp_path)
    text = path.read_text()
    document = json.loads(text)
    assert document["command"] == (
        "python -m bench.golden http://HOST:8000 golden.json --works 'a b' --api-key KEY --set=model=m"
        " --workload=chat,t.jsonl --api-key=KEY"
    )
    assert "secret" not in text and "sesame" not in text
    assert os.uname().nodename not in text.replace(os.uname().sysname, "") or os.uname().nodename in ("x86_64", "Linux")
    assert str(result.ROOT) not in text
    assert document["metrics"][0]["holds"] is False and not outcome.holds
    assert {"schema", "date", "commit", "machine", "works", "configuration"} <= document.keys()
    assert document["machine"]["cores"] >= 1


def test_a_figure_that_was_not_measured_holds_no_bound() -> None:
    assert result.at_most("m", None, 1.0, "s").holds is False
    assert result.at_least("m", None, 1.0, "s").holds is False
    assert result.plain("m", 1.0, "s").holds is None


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("ray::ServeReplica:rantang:Router", "router"),
        ("ray::ServeReplica:rantang:Router.handle_request", "router"),
        ("ray::Router:smollm2", "router"),
        ("ray::ServeReplica:rantang:Replica", "replica"),
        ("ray::Replica:smollm2:rank0", "replica"),
        ("ray::ServeController", "controller"),
        ("ray::HAProxyManager", "proxy"),
        ("/x/haproxy -f /tmp/c.cfg", "haproxy"),
        ("/v/bin/python -m cluster.cli serve --port 1", "driver"),
        ("/v/ray/core/src/ray/raylet/raylet --x", "ray"),
        ("ray::IDLE", "ray"),
    ],
)
def test_role_by_title(title: str, role: str) -> None:
    assert processes.role_of(title) == role
