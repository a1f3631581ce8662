"""The simulator itself: the same bytes again, traces read and spread, figures that follow from known journeys."""

import json
from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.simulator.agenda import Agenda
from bench.simulator.command import app
from bench.simulator.cost import GPU_8B, Profile, ProfileError, read_profile
from bench.simulator.cost_replica import CostReplica
from bench.simulator.coverage import every_length
from bench.simulator.journey import Journey, Promise
from bench.simulator.score import LENGTHS, coverage
from bench.simulator.setup import Setup
from bench.simulator.slo import Slo
from bench.simulator.trace import TraceError, TraceRequest, read_trace, synthetic
from bench.simulator.world import Layout
from replica.contract.messages import FinishReason, GenerateRequest, SamplingParams
from router.config import RouterConfig
from router.policy.policies import POLICIES

SLO = Slo()


def conversation_trace(path: Path) -> Path:
    """Sixty requests in six buckets of three seconds; five conversations that grow by a block."""
    rows = []
    for i in range(60):
        family, turn = i % 5, i // 5
        length = 512 * (2 + turn) + 100
        ids = [family * 1000 + block for block in range(3 + turn)]
        rows.append({"timestamp": 3000 * (i // 10) - (i // 10 > 2), "input_length": length, "output_length": 5 + i % 7, "hash_ids": ids})
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize("kv", ["free", "production"])
def test_the_same_seed_and_trace_give_the_same_bytes(tmp_path: Path, kv: str) -> None:
    trace = conversation_trace(tmp_path / "trace.jsonl")
    asked = ["--trace", str(trace), "--replicas", "3", "--speed", "2", "--noise", "0.2", "--kv", kv, "--json"]
    outputs = [CliRunner().invoke(app, [*asked, "--seed", seed]) for seed in ("4", "4", "5")]
    assert [one.exit_code for one in outputs] == [0, 0, 0], outputs[0].output
    first, again, other = (one.stdout for one in outputs)
    assert first == again
    assert first != other
    figures = json.loads(first)
    wanted = {"hit_rate", "ttft_p50_s", "ttft_p95_s", "tpot_p95_s", "good_fraction", "goodput_fraction", "token_goodput_fraction"}
    assert wanted | {"shed_fraction", "ttft_coverage", "load_max_over_mean"} <= set(figures)
    assert figures["requests"] == figures["completed"] == 60
    assert figures["failed"] == 0
    assert figures["hit_rate"] > 0.5, "conversations come back"


def test_all_policies_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, picture = conversation_trace(tmp_path / "trace.jsonl"), tmp_path / "picture.svg"
    asked = ["--trace", str(trace), "--compare", "--requests", "20"]
    told = CliRunner().invoke(app, [*asked, "--plot", str(picture)])
    assert told.exit_code == 0, told.output
    assert all(name in told.stdout for name in POLICIES)
    assert b"<svg" in picture.read_bytes()
    rows = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)["policies"]
    assert tuple(rows) == POLICIES


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "no requests"),
        ('{"timestamp": 0}', "line 1"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "at least one token"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [-1]}', "line 1"),
    ],
)
def test_what_is_no_trace_is_refused_by_name_and_line(tmp_path: Path, content: str, fault: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(TraceError, match=fault):
        read_trace(path)
    told = CliRunner().invoke(app, ["--trace", str(path)])
    assert told.exit_code == 2


def test_arrivals_are_spread_inside_their_bucket_and_hurried_by_speed(tmp_path: Path) -> None:
    arrivals = [one.arrival_s for one in read_trace(conversation_trace(tmp_path / "trace.jsonl"), speed=2.0)]
    assert arrivals[:11] == pytest.approx([0.15 * i for i in range(11)])
    with pytest.raises(TraceError, match="speed"):
        read_trace(tmp_path / "trace.jsonl", speed=0.0)


def test_a_trace_of_lengths_shares_no_prefix(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,1200,10\n2023-11-16 18:17:04.4799600,1200,8\n")
    first, second = read_trace(path)
    assert second.arrival_s == pytest.approx(0.5)
    assert len(first.keys) == len(second.keys) == 2
    assert not set(first.keys) & set(second.keys)


def test_blocks_of_another_size_are_read_as_the_profiles(tmp_path: Path) -> None:
    """What `convert` writes has blocks of 16 tokens: their first 64 tokens are four blocks, not none."""
    path = tmp_path / "own.jsonl"

    def keys(lines: list[dict[str, object]], block_tokens: int) -> list[tuple[bytes, ...]]:
        path.write_text("\n".join(json.dumps({"timestamp": 0, "output_length": 1, **line}) for line in lines))
        return [one.keys for one in read_trace(path, block_tokens=block_tokens)]

    small: list[dict[str, object]] = [
        {"input_length": 64, "block_tokens": 16, "hash_ids": [0, 1, 2, 3]},
        {"input_length": 60, "block_tokens": 16, "hash_ids": [0, 1, 4]},
        {"input_length": 9, "block_tokens": 16},
    ]
    assert [len(each) for each in keys(small, 16)] == [4, 3, 0]
    one, other, _ = keys(small, 32)
    assert len(one) == 2 and one[:1] == other and one[0] != one[1]
    large: list[dict[str, object]] = [{"input_length": 700, "hash_ids": [7, 8]}, {"input_length": 512, "hash_ids": [7]}]
    one, other = keys(large, 256)
    assert len(one) == len(set(one)) == 2 and one == other
    with pytest.raises(TraceError, match=r"line 1.*blocks of 16 tokens cannot be read as the profile's of 24"):
        keys(small, 24)


@pytest.mark.parametrize(("kv", "size"), [("free", "cache_blocks"), ("production", "pool_blocks")])
def test_a_profiles_sizes_count_unless_others_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: str, size: str) -> None:
    seen: list[Profile] = []
    monkeypatch.setattr("bench.simulator.command._tell", lambda setup, *_, **__: seen.append(setup.profile))
    profile = tmp_path / "p.yaml"
    profile.write_text(f"step_time: {{a: 0.01, b: 0.0001, c: 0.00002, d: 0.0}}\n{size}: 77\n")
    asked = ["--trace", str(conversation_trace(tmp_path / "trace.jsonl")), "--profile", str(profile), "--kv", kv]
    for more in ([], ["--cache-blocks", "9"]):
        outcome = CliRunner().invoke(app, [*asked, *more])
        assert outcome.exit_code == 0, outcome.output
    assert [getattr(each, size) for each in seen] == [77, 9]


def test_a_profile_comes_from_yaml_or_from_a_measured_report(tmp_path: Path) -> None:
    yaml_file, json_file = tmp_path / "gpu.yaml", tmp_path / "measured.json"
    yaml_file.write_text("step_time: {a: 0.01, b: 0.0001, c: 0.00002, d: 0.0}\nmax_num_seqs: 16\n")
    json_file.write_text(json.dumps({"details": [{"load": {"step_time": {"a": 0.02, "b": 1e-4, "c": 0, "d": 0, "e": 1e-9}}}]}))
    assert (read_profile(yaml_file).step_time.a, read_profile(yaml_file).max_num_seqs) == (0.01, 16)
    assert read_profile(json_file).step_time.e == 1e-9
    for content in ("step_time: {a: -1, b: 0, c: 0, d: 0}", "a: 1", "[", "step_time: {a: x, b: 0, c: 0, d: 0}"):
        yaml_file.write_text(content)
        with pytest.raises(ProfileError):
            read_profile(yaml_file)


def test_events_of_one_moment_happen_in_the_order_written() -> None:
    agenda, heard = Agenda(), []
    for what in (3, 1, 2):
        agenda.at(1.0, heard.append, what)
    agenda.at(0.5, lambda: agenda.at(0.1, heard.append, 0))
    while agenda.next(2.0):
        pass
    assert heard == [0, 3, 1, 2], "and what should have been is now"
    assert agenda.now == 1.0


def test_a_request_alone_takes_what_its_steps_cost() -> None:
    """5,000 tokens: steps of 2,048, 2,048 and 904; then four decodes at 5,000 tokens of context."""
    setup = Setup(layout=Layout(replicas=1, delay_s=0.0))
    figures = setup.run((TraceRequest(0.0, 5_000, 5),), SLO)
    k = GPU_8B
    prefill_s = 3 * k.a + 5_000 * k.b + k.d * (2_048 + 4_096 + 5_000)
    assert figures["ttft_p50_s"] == pytest.approx(prefill_s, abs=1e-5)
    assert figures["tpot_p50_s"] == pytest.approx(k.a + k.c + k.d * 5_002.5, abs=1e-5)


def test_the_cache_holds_so_many_blocks_and_forgets_the_least_used() -> None:
    replica = CostReplica(Profile(cache_blocks=4))

    def prefill(attempt: int, keys: tuple[bytes, ...], now: float) -> int:
        request = GenerateRequest(attempt, "r", 0, (0,) * (512 * len(keys) + 1), keys, SamplingParams(seed=0, max_tokens=1))
        replica.submit(0, request, now)
        cached = 0
        while replica.begin(now) is not None:
            for _, delta in replica.end(now).deltas:
                cached = delta.cached_tokens or cached
        replica.check()
        return cached

    a, b, c = ((bytes([i]) * 16, bytes([i, 1]) * 8) for i in range(3))
    assert [prefill(i, keys, float(i)) for i, keys in enumerate((a, b, a, c, a, b))] == [0, 0, 1024, 0, 1024, 0]


def test_coverage_says_how_often_a_quantile_held_and_what_a_constant_would_lose() -> None:
    done = []
    for i in range(100):
        actual_s = (i + 1) / 100
        journey = Journey(i, TraceRequest(0.0, 100, 2), 0, first_s=actual_s, finishes=[FinishReason.LENGTH])
        journey.promise = Promise(100, 0.0, (0.5, 0.9, 0.98), 1.0)
        done.append(journey)
    figures = coverage(done)
    assert figures["ttft_coverage"] == {"0.5": 0.5, "0.9": 0.9, "0.98": 0.98}
    assert figures["ttft_coverage_by_length"]["<=128"]["n"] == 100
    assert figures["ttft_pinball_s"] == pytest.approx(figures["ttft_pinball_constant_s"])
    for journey in done:
        assert journey.promise is not None
        journey.promise.quantiles_s = (2.0, 2.0, 2.0)
    assert coverage(done)["ttft_pinball_s"] > figures["ttft_pinball_s"]


def test_admission_refuses_the_hopeless_and_keeps_its_promises() -> None:
    requests = synthetic(400, prompt_tokens=2_000, output_tokens=100, rate_per_s=20.0, seed=1)
    open_setup = Setup(layout=Layout(replicas=1), profile=Profile(step_slo_s=0.08))
    everyone = open_setup.run(requests, SLO)
    chosen = replace(open_setup, admission=True).run(requests, SLO)
    assert everyone["shed_fraction"] == 0.0
    assert chosen["shed_fraction"] > 0.3
    assert chosen["goodput_fraction"] > 2 * everyone["goodput_fraction"]
    assert chosen["goodput_fraction"] >= 0.97 * (1 - chosen["shed_fraction"])
    assert sum(chosen["shed_by_length_fifth"]) / 5 == pytest.approx(chosen["shed_fraction"])


def test_affinity_beats_chance_on_conversations() -> None:
    """The whole point, on a trace of our own: 40 conversations, 4 replicas, more work than without hits they could do."""
    keys = [tuple(((c + 1) << 32 | b).to_bytes(16, "big") for b in range(30)) for c in range(40)]
    requests = tuple(
        TraceRequest((turn * 40 + c) * 0.05, 512 * (10 + turn), 50, keys[c][: 10 + turn]) for turn in range(8) for c in range(40)
    )
    rows = {name: Setup(router=RouterConfig(policy=name)).run(requests, SLO) for name in ("least_delay", "random")}
    assert rows["least_delay"]["hit_rate"] > rows["random"]["hit_rate"] + 0.2
    assert rows["least_delay"]["good_fraction"] > rows["random"]["good_fraction"]


def test_every_length_is_as_frequent_and_the_same_twice() -> None:
    requests = every_length(80, seed=3)
    assert requests == every_length(80, seed=3) != every_length(80, seed=4)
    places = Counter(bisect_left(LENGTHS, one.prompt_tokens) for one in requests)
    assert places == dict.fromkeys(range(len(LENGTHS) + 1), 20)
    assert min(one.prompt_tokens for one in requests) > 16
