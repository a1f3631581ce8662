"""The commands of the analysis from their command line on: against a mock server, and on results made up."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import choose_command, ladder_command, run_command
from bench.analysis.choice import Demand
from bench.cli import app
from bench.ladder_command import LADDER, LadderOptions, gains, plan_ladder
from bench.load import Load
from bench.mock_openai import Fault, Pace
from bench.point import Served
from bench.prompt_style import PromptStyle
from bench.request_log import SUFFIX
from bench.result import Result, load_result, write
from bench.server import Server, ServerOptions, check, serve_arguments
from bench.slo import Slo
from bench.sweep.plan import SweepOptions
from tests.bench.made_up_results import FACTS, card, point, rows_for
from tests.bench.served_mock import served_mock


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.report_command.can_draw", lambda: False)  # the plots have tests of their own


def call(*arguments: str) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, list(arguments))
    return outcome.exit_code, " ".join(outcome.output.split())


def a_result(folder: Path, name: str, *cards: float, **extra: str) -> Path:
    """A result of runs with these TTFTs."""
    facts = replace(FACTS, **extra)  # type: ignore[arg-type]
    return write(Result(name, {}, points=(point([card(ttft_ms=ttft) for ttft in cards], facts=facts),)), folder, rows_for(0))


def test_sweep_then_explain_and_choose_from_it(tmp_path: Path) -> None:
    with served_mock(Pace(5.0, 1.0)) as url:
        status, said = call("sweep", "--url", url, "-w", "chat", "--requests", "15", "--rates", "200,300", "--out", str(tmp_path))
    assert status == 0, said
    assert (
        "knee at 300 req/s, goodput" in said
        and "the highest load measured; not a steady load: its requests were due within 0.047 s" in said
        and "left for 3 loads" in said
    )
    (source,) = tmp_path.glob("sweep-chat-*.json")
    found = load_result(source)
    assert [each.load.rate_per_s for each in found.points] == [200.0, 300.0, 10_000.0]
    assert {metric.name: metric.value for metric in found.metrics}["baseline.knee"] == 300.0
    assert not list(tmp_path.glob("*.partial"))
    assert source.with_suffix(".md").exists() and source.with_suffix(".csv").exists()
    status, said = call("explain", str(source))
    assert status == 0 and said.count("chat: ") == 3 and "chat: burst" in said
    status, said = call("choose", "--read", str(source), "--load", "100", "--price-per-hour", "3.6")
    assert status == 0
    assert "choose baseline" in said and "bounded queue" in said and "cannot tell from 1 run" in said and "0.01" in said


def test_nothing_that_is_asked_of_a_finished_sweep_is_dropped(tmp_path: Path) -> None:
    source = str(write(Result("sweep-chat", {}, points=(point([card(1.0)]), point([card(2.0)]))), tmp_path, rows_for(0)))
    status, said = call("choose", "--read", source, "--slo", "ttft_ms=1")
    assert status == 2 and "judged by ttft ≤ 2000 ms, not by ttft ≤ 1 ms" in said
    status, said = call("choose", "--read", source, "--repeats", "3", "--set", "dtype=float32")
    assert status == 2 and "repeats, settings says nothing with --read" in said
    assert call("choose", "--read", source, "--slo", "ttft_ms=2000")[0] == 0, "the control: the same SLO"
    status, said = call("choose", "--read", source, "--read", source)
    assert status == 2 and "a sweep is given twice" in said
    assert call("choose", "--read", source, "--load", "1", "--price-per-hour", "2")[0] == 0


def test_a_state_in_the_way_is_refused_and_can_be_thrown_away(tmp_path: Path) -> None:
    state = tmp_path / "sweep-chat-baseline.partial" / "state.json"
    state.parent.mkdir()
    state.write_text(json.dumps({"schema": 1, "identity": {"workload": "other"}, "salt": "x", "points": []}))
    with served_mock() as url:
        arguments = ("sweep", "--url", url, "--requests", "5", "--rates", "500", "--no-burst", "--out", str(tmp_path))
        status, said = call(*arguments)
        assert status == 2 and "holds another sweep" in said and "--restart" in said
        status, said = call(*arguments, "--restart")
        assert status == 0, said


def test_a_queue_time_that_nobody_tells_is_refused_before_the_trace_is_sent(tmp_path: Path) -> None:
    with served_mock() as url:
        arguments = ("--url", url, "--requests", "5", "--rates", "500", "--no-burst", "--out", str(tmp_path))
        status, said = call("sweep", "--slo", "queue_ms=50", *arguments)
        assert status == 1 and "does not tell its queue time" in said and "5 requests" not in said
        status, said = call("sweep", "--slo", "ttft_ms=5000", *arguments)
        assert status == 0 and "5 requests" in said, "the control"


def test_sweep_of_a_server_that_refuses_all(tmp_path: Path) -> None:
    with served_mock(fault=Fault.SHED) as url:
        status, said = call("sweep", "--url", url, "--requests", "5", "--out", str(tmp_path))
    assert status == 1 and "the server refused every request" in said and "nothing was answered at all" not in said


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("sweep", "--slo", "tfft=1"), "there are ttft_ms"),
        (("sweep", "-w", "chess"), "unknown workload"),
        (("sweep", "-w", "chat@5"), "(--rates)"),
        (("sweep", "-w", "chat,mix"), "only one workload is swept at a time"),
        (("sweep", "--rates", "1,x"), "is no rate"),
        (("sweep", "--rates", "1,1"), "is given twice: --repeats 2"),
        (("sweep", "--rates", "0.001"), "only with --max-hours"),
        (("ladder", "--rate", "0.01"), "only with --max-hours"),
        (("sweep", "--length-scale", "0"), "the scale of lengths must be positive"),
        (("choose", "--context-tokens", "1"), "a context has at least 2 tokens"),
        (("choose", "--text-prompts", "--read", "x.json"), "text_prompts says nothing with --read"),
        (("sweep", "--set", "max_num_sequences=1"), "unknown setting"),
        (("choose", "--change", "max_num_seqs=8", "--url", "http://127.0.0.1:9"), "leave --url out"),
        (("choose", "--change", "replicas=two"), "must be a number"),
        (("choose", "--change", "max_num_seqs=8", "--change", "max_num_seqs=8"), "given twice"),
        (("choose", "--change", "max_num_seqs=8", "--change", "max-num-seqs= 8"), "given twice"),
        (("choose", "--set", "max_num_seqs=8", "--change", "max_num_seqs=8"), "given twice: max_num_seqs=8 is baseline"),
        (("choose", "--change", "replicas=1"), "given twice: replicas=1 is baseline"),
        (("ladder", "--streams", "2", "--rate", "1"), "give one of them"),
        (("sweep", "-w", "chat", "--workload", "a"), "--workload is given twice"),
        (("sweep", "--burst", "--no-burst"), "--burst is given twice"),
        (("sweep", "--price-per-hour", "0"), "price_per_hour must be a positive number"),
        (("choose", "--load", "0"), "load must be a positive number, got 0"),
        (("choose", "--load", "-1"), "load must be a positive number, got -1"),
        (("choose", "--load", "nan"), "load must be a positive number, got nan"),
        (("choose", "--price-per-hour", "-1"), "price_per_hour must be a positive number, got -1"),
        (("sweep", "--out", "/proc/nope"), "no result can be written"),
        (("choose", "--out", "/proc/nope"), "no result can be written"),
        (("ladder", "--out", "/proc/nope"), "no result can be written"),
        (("explain", "nowhere.json"), "No such file"),
        (("report", "nowhere.json"), "No such file"),
        (("compare", "nowhere.json", "nowhere.json"), "No such file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: tuple[str, ...], word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    status, said = call(*arguments)
    assert status == 2 and word in said


@pytest.mark.parametrize(("kept", "why"), [(None, "No such file"), (0.5, "Compressed file ended"), (b"no gz", "Not a gzipped file")])
@pytest.mark.parametrize("command", [("choose", "--read"), ("explain",)])
def test_requests_that_cannot_be_read_are_named(tmp_path: Path, command: tuple[str, ...], kept: float | bytes | None, why: str) -> None:
    source = write(Result("sweep-chat", {}, points=(point([card(1.0)]), point([card(2.0)]))), tmp_path, rows_for(0))
    assert call(*command, str(source))[0] == 0, "the control: as it was written"
    requests = source.with_name(source.stem + SUFFIX)
    whole = requests.read_bytes()
    requests.unlink()
    if kept is not None:
        requests.write_bytes(kept if isinstance(kept, bytes) else whole[: int(len(whole) * kept)])
    status, said = call(*command, str(source))
    assert status == 2 and why in said and "requests of a result" in said


def test_a_point_without_runs_is_refused(tmp_path: Path) -> None:
    source = write(Result("run-chat", {}, points=(replace(point([card(1.0)]), repeats=()),)), tmp_path)
    status, said = call("explain", str(source))
    assert status == 2 and "a point without any run" in said


def test_compare_says_what_is_real(tmp_path: Path) -> None:
    a, b = a_result(tmp_path, "a", 100, 101, 99), a_result(tmp_path, "b", 200, 201, 199)
    status, said = call("compare", str(a), str(b), "--metrics", "ttft_p95_ms,goodput_per_s")
    assert status == 0 and "worse" in said and "+100.0 %" in said and "no difference beyond the spread" in said
    status, said = call("compare", str(a), str(a_result(tmp_path, "c", 200)))
    assert status == 0 and "cannot tell" in said and "--repeats" in said
    other = a_result(tmp_path, "d", 100, 101, hash="ffff")
    assert call("compare", str(a), str(other))[0] == 2
    assert call("compare", str(a), str(other), "--force")[0] == 0
    status, said = call("compare", str(a), str(b), "--metrics", "speed")
    assert status == 2 and "there are offered_per_s" in said


def test_configurations_are_the_baseline_and_each_change(tmp_path: Path) -> None:
    base = SweepOptions("chat", Slo(ttft_ms=1.0), ServerOptions(settings={"dtype": "float32"}), folder=tmp_path)
    plans = choose_command.plans_of(base, ["max_num_seqs=8", "replicas=2,max_num_seqs=4"])
    assert [plan.options.label for plan in plans] == ["baseline", "max_num_seqs=8", "replicas=2,max_num_seqs=4"]
    assert [plan.options.server.replicas for plan in plans] == [1, 1, 2]
    assert plans[2].options.server.settings == {"dtype": "float32", "max_num_seqs": "4"}
    assert len({plan.state_folder for plan in plans}) == 3


def test_replicas_are_one_number_however_they_are_given() -> None:
    """What is started is what is told and billed."""
    given = ServerOptions(settings={"replicas": "2", "dtype": "float32"})
    assert (given.replicas, given.settings) == (2, {"dtype": "float32"})
    assert serve_arguments(given)[:2] == ["--replicas", "2"]
    base = SweepOptions("chat", Slo(ttft_ms=1.0), given)
    plans = choose_command.plans_of(base, ["replicas=4", "max_num_seqs=8"])
    assert [plan.options.server.replicas for plan in plans] == [2, 4, 2]
    run = list(run_command.configurations(given, ["replicas=3"]))
    assert [(label, server.replicas) for label, server in run] == [("baseline", 2), ("replicas=3", 3)]
    assert all("replicas" not in server.settings for _, server in run)
    with pytest.raises(ValueError, match="must be a number"):
        check(ServerOptions(settings={"replicas": "two"}))
    with pytest.raises(ValueError, match="leave --url out"):
        check(ServerOptions("http://127.0.0.1:9", settings={"replicas": "2"}))


def test_choose_runs_sweeps_and_writes_one_result(tmp_path: Path) -> None:
    with served_mock(Pace(5.0, 1.0)) as url:
        options = ("--requests", "10", "--rates", "200", "--load", "100", "--out", str(tmp_path))
        status, said = call("choose", "--url", url, *options)
    assert status == 0 and "choose baseline; nothing else was tried" in said
    (source,) = tmp_path.glob("choose-chat-*.json")
    assert "What happens in a burst?" in load_result(source).details["texts"]["The choice"]
    assert not list(tmp_path.glob("*.partial"))


def test_a_ladder_that_is_interrupted_keeps_its_finished_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter([None, SystemExit(143)])

    @contextlib.contextmanager
    def opened(_options: ServerOptions) -> Iterator[Server]:
        if (end := next(steps)) is not None:
            raise end
        yield Server(url, PromptStyle("mock"))

    monkeypatch.setattr("bench.ladder_command.open_server", opened)
    with served_mock() as url:
        status, said = call("ladder", "--requests", "2", "--out", str(tmp_path))
    assert status == 143 and "interrupted: 1 of 5 steps are finished, and kept" in said
    assert len(load_result(next(tmp_path.glob("ladder-mix-*.json"))).points) == 1


def test_nobody_chosen_is_status_1(tmp_path: Path) -> None:
    points = (point([card(1.0, 10.0, 9_000.0)], served=Served("rantang", "", "rantang serve")),)
    source = write(Result("sweep-chat", {}, points=points), tmp_path, rows_for(0))
    status, said = call("choose", "--read", str(source))
    assert status == 1 and "no configuration keeps the SLO" in said and "TTFT p95 9000 ms > 2000 ms" in said
    for question in ("highest traffic", "What happens in a burst? not measured", "preemption and KV pressure", "Is it repeatable?"):
        assert question in said, "the four questions are answered all the same"
    assert Demand(Slo()).price_per_replica_hour == 1.0


def test_the_ladder_adds_one_thing_at_a_time() -> None:
    plan = plan_ladder(LadderOptions("chat", Slo(ttft_ms=1.0), Load(streams=4), requests=8))
    assert [name for name, _ in plan.steps] == [name for name, _ in LADDER]
    settings = [{"batching": "adaptive", "enable_chunked_prefill": "true", "enable_prefix_caching": "true", **step} for _, step in LADDER]
    changed = [sum(before[key] != after[key] for key in before) for before, after in itertools.pairwise(settings)]
    assert changed == [1, 1, 1, 1]
    assert all(server.settings["queue_time_slo_s"] == "3600" for _, server in plan.steps)
    with pytest.raises(ValueError, match="leave --url out"):
        plan_ladder(LadderOptions("chat", Slo(ttft_ms=1.0), Load(), ServerOptions("http://127.0.0.1:9")))


def test_gains_are_over_the_step_before_and_doubt_is_marked() -> None:
    steps = [
        point([card(1.0, ttft_ms=1_000.0), card(1.0, ttft_ms=1_010.0)], label="static"),
        point([card(2.0, ttft_ms=500.0), card(2.0, ttft_ms=505.0)], label="iteration"),
        point([card(2.0, ttft_ms=400.0), card(2.0, ttft_ms=600.0)], label="chunked"),
    ]
    grid = gains(steps)
    column = grid.headings.index("TTFT p95, ms")
    assert [row[column] for row in grid.rows] == ["1,005", "502 (-50 %)", "500 (-0 %?)"]
    assert [row[0] for row in grid.rows] == ["static", "iteration", "chunked"]
    assert "+100 %" in grid.rows[1][grid.headings.index("completed, req/s")]
    assert ladder_command.METRICS[0] == "output_tokens_per_s"
