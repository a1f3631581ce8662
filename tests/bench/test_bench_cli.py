"""The command: what it refuses before anything starts, what it writes, and that it costs `rantang serve` nothing."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bench import result, run_command, stack
from bench.cli import app
from bench.load import Load
from bench.measurement import Measured
from bench.mock_openai import Pace
from bench.prompt_style import PromptStyle
from bench.result import load_requests, load_result
from bench.run_command import CONTROLS, RunOptions, configurations, plan
from bench.server import Server, ServerOptions, serve_arguments
from bench.slo import Slo
from bench.stack import StackError
from cluster.commands import GROUP
from tests.bench.mock_pair import StartMock

ROOT = Path(__file__).resolve().parents[2]


def said(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "300"})
    return done.exit_code, done.output


def test_run_writes_all_four_files(mock_url: StartMock, tmp_path: Path) -> None:
    url = mock_url(Pace(token_ms=1))
    options = (
        "--rate",
        "80",
        "--requests",
        "10",
        "--repeats",
        "2",
        "--slo-ttft-ms",
        "2000",
        "--price-per-hour",
        "1",
        "--out",
        str(tmp_path),
    )
    status, text = said("run", "-w", "chat,a", "--url", url, *options)
    assert status == 0, text
    assert "goodput, req/s" in text and "run 2 of 2" in text and ".requests.jsonl.gz" in text
    path = next(tmp_path.glob("run-chat-a-*.json"))
    found = load_result(path)
    assert [(point.workload.name, len(point.repeats)) for point in found.points] == [("chat", 2), ("a", 2)]
    assert len(load_requests(path)) == 40
    assert path.with_suffix(".md").exists() and len(path.with_suffix(".csv").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("-w", "chta"), "unknown workload 'chta'; there are chat"),
        (("-w", ""), "no workload"),
        (("--rate", "1", "--streams", "2"), "give one of them"),
        (("--rate", "-1"), "rate_per_s must be positive"),
        (("--repeats", "0"), "repeats must be at least 1"),
        (("--arrivals", "often", "--rate", "1"), "'often' is not a valid Arrivals"),
        (("--set", "max_seqs=3"), "unknown setting 'max_seqs'; there are model"),
        (("--set", "max_num_seqs"), "no NAME=VALUE"),
        (("--set", "max_num_seqs=0"), "max_num_seqs"),
        (("--change", "max_num_seqs=none"), "max_num_seqs"),
        (("--url", "http://127.0.0.1:1", "--change", "max_num_seqs=3"), "leave --url out"),
        (("--url", "http://127.0.0.1:1", "--set", "max_num_seqs=3"), "leave --url out"),
        (("--url", "ftp://x"), "not an http"),
        (("-w", "chat@0"), "'chat@0': rate_per_s must be positive"),
        (("-w", "chat@1.2.3"), "'chat@1.2.3': '1.2.3' is no rate"),
        (("-w", "chat@fast"), "unknown workload 'chat@fast'"),
        (("-w", "chat@."), "'chat@.': '.' is no rate"),
        (("-w", "gone.jsonl"), "there is no file 'gone.jsonl'"),
        (("-w", "gone/trace"), "there is no file 'gone/trace'"),
        (("-w", "/dev/null"), "'/dev/null' is no file that can be read twice"),
        (("-w", "chat@1", "--duration-s", "5", "--requests", "3"), "give one of them"),
        (("-w", "chat@1", "--duration-s", "-5"), "duration must be a positive number"),
        (("-w", "chat@5,chat@5"), "chat is given twice at one load (5 req/s): --repeats 2"),
        (("-w", "a", "-w", "a"), "a is given twice at one load"),
        (("-w", "chat@5,chat@5.0"), "chat is given twice"),
        (("--change", "max_num_seqs=8", "--controls"), "the change max_num_seqs=8 is given twice"),
        (("--set", "max_num_seqs=8", "--change", "max_num_seqs=8"), "max_num_seqs=8 changes nothing"),
        (("--speed", "1e-6"), "become due over 1"),
        (("--speed", "1e-6"), "only with --max-hours"),
        (("-w", "chat@0.001"), "become due over 33 h"),
        (("-w", "chat@1", "--requests", "9000", "--repeats", "2"), "become due over 5 h"),
        (("-w", "chat@1", "--duration-s", "1e12"), "only with --max-hours"),
        (("-w", "chat@1000", "--duration-s", "14000"), "requests must be from 1 to 200,000, got 14,000,000"),
        (("--speed", "1e-320"), "more time than there is"),
        (("-w", "chat", "--rate", "1e-308"), "more time than there is"),
        (("--url", "http://127.0.0.1:1", "--api-key", "a\nb"), "an API key is one line"),
        (("--max-hours", "0"), "max_hours must be a positive number"),
        (("-w", "chat,a", "--duration-s", "5"), "a duration is of arrivals at a rate, and none is given"),
        (("--arrivals", "often", "--rate", "1"), "there are workload, poisson, gamma, even"),
        (("--slo-ttft-ms", "nan"), "ttft_ms must be a positive number, got nan"),
        (("--slo-e2e-ms", "-5"), "e2e_ms must be a positive number, got -5"),
        (("--price-per-hour", "-1"), "price_per_hour must be a positive number, got -1"),
        (("--timeout-s", "nan"), "--timeout-s: a request has some time"),
        (("--url", "ftp://x"), "--url: "),
        (("--streams", "1000000000", "--requests", "5"), "streams must be at most 200,000, got 1,000,000,000"),
        (("-w", "chat@5", "--rate", "3"), "--rate 3 says nothing where every workload has a rate of its own"),
        (("-w", "chat@5", "--streams", "3"), "--streams 3 says nothing"),
        (("-w", "chat@1e3"), "'1e3' is no rate in plain digits"),
        (("-w", "/proc"), "'/proc' is a folder, no workload"),
        (("--out", "/proc/nope"), "no result can be written to /proc/nope: No such file"),
        (("--out", "/proc"), "no result can be written to /proc"),
        (("--out", __file__), "File exists"),
    ],
)
def test_run_refuses_before_anything_starts(arguments: tuple[str, ...], why: str) -> None:
    status, text = said("run", *arguments)
    assert status == 2
    assert why in " ".join(text.replace("│", " ").split()), text


def test_a_workload_with_a_rate_of_its_own() -> None:
    options = RunOptions(["a", "chat@2.5", "mix"], load=Load(new_connections=True), duration_s=8)
    loads = [(each.workload.name, each.load.streams, each.load.rate_per_s, len(each.workload)) for each in plan(options).asked]
    assert loads == [("a", 1, None, 4), ("chat", None, 2.5, 20), ("mix", None, None, 120)]
    assert all(each.load.new_connections for each in plan(options).asked)
    given = RunOptions(["a", "chat"], load=Load(streams=3), requests=5)
    assert [(each.load.streams, len(each.workload)) for each in plan(given).asked] == [(3, 5), (3, 5)]


def test_what_takes_long_is_said_and_measured_only_when_asked_for() -> None:
    slow = RunOptions(["chat"], load=Load(speed=1e-3), requests=100)
    with pytest.raises(ValueError, match="become due over 33 h"):
        plan(slow)
    assert plan(replace(slow, max_hours=48)).expected_s > 50_000
    assert plan(replace(slow, load=Load(streams=2))).expected_s == 0.0
    assert plan(replace(slow, load=Load(), repeats=2)).expected_s == pytest.approx(200, rel=0.3)


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "trace.jsonl").write_text('{"timestamp":0,"input_length":8,"output_length":2}\n')
    one, two = (str(tmp_path / folder / "trace.jsonl") for folder in ("one", "two"))
    with pytest.raises(ValueError, match="two different workloads are called 'trace'"):
        plan(RunOptions([one, two]))
    assert len(plan(RunOptions([f"{one}@1", f"{one}@2"])).asked) == 2, "the control: one file at two rates"


def test_a_full_disk_is_one_line_after_the_figures(mock_url: StartMock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*asked: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("bench.result.write", full)
    asked = ("run", "-w", "a", "--requests", "1", "--url", mock_url(), "--out", str(tmp_path))
    done = CliRunner().invoke(app, list(asked))
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    assert "TTFT p50" in done.output and f"could not be written to {tmp_path}: No space left" in done.output
    with pytest.raises(SystemExit, match="No space left"):
        result.show(result.Result("drill", {}), tmp_path)


def test_controls_change_one_thing_at_a_time() -> None:
    base = ServerOptions(settings={"dtype": "float32"})
    made = list(configurations(base, CONTROLS))
    assert [label for label, _ in made] == ["baseline", *CONTROLS]
    for label, options in made[1:]:
        name, value = label.split("=")
        assert dict(options.settings) == {"dtype": "float32", name: value}


def test_what_is_given_loosely_is_understood(mock_url: StartMock, tmp_path: Path) -> None:
    address = mock_url().removeprefix("http://")
    asked = ("--requests", "1", "--out", str(tmp_path), "--url", address)
    status, text = said("run", "-w", " a, b ", *asked)
    assert status == 0 and "b, closed loop, 8 streams" in text
    status, text = said("run", "-w", "a", *asked, "--timeout-s", "1e-9")
    assert status == 1 and "1 × timeout" in text, "and a run without length divides nothing by 0"


def test_nothing_completed_is_status_1(mock_url: StartMock, tmp_path: Path) -> None:
    options = ("--requests", "2", "--timeout-s", "5", "--out", str(tmp_path))
    status, text = said("run", "-w", "a", "--url", "http://127.0.0.1:9", *options)
    assert status == 1 and "nothing answers at http://127.0.0.1:9" in text
    assert said("run", "-w", "a", "--url", mock_url(), *options)[0] == 0


def test_settings_become_flags_of_serve() -> None:
    options = ServerOptions(settings={"max_num_seqs": "8", "enable_prefix_caching": "false", "haproxy": "true"})
    assert serve_arguments(options) == ["--replicas", "1", "--max-num-seqs", "8", "--no-enable-prefix-caching", "--haproxy"]


def test_lists() -> None:
    assert "mix" in said("workloads")[1]
    assert "goodput_per_s" in said("metrics")[1]


def test_convert_names_the_line(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"timestamp": 1, "prompt": "hello", "output_tokens": 3}) + "\n")
    assert said("convert", str(log), str(tmp_path / "out.jsonl")) == (
        0,
        "1 request from 1970-01-01 00:00:01 to 1970-01-01 00:00:01 UTC; the lengths of 1 prompts are estimates\n",
    )
    status, text = said("convert", str(log), str(tmp_path / "none" / "out.jsonl"))
    assert status == 2 and "out.jsonl: No such file" in text
    log.write_text("{}\n")
    status, text = said("convert", str(log), str(tmp_path / "out.jsonl"))
    assert status == 2 and "line 1: no" in text


def test_the_command_line_finds_commands_of_others_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from cluster.cli import cli

    looked: list[dict[str, str]] = []

    def entry_points(**wanted: str) -> EntryPoints:
        looked.append(wanted)
        return EntryPoints([EntryPoint("bench", "bench.cli:app", GROUP)]).select(**wanted)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert isinstance(cli, typer.Typer)
    done = CliRunner().invoke(cli, ["bench", "metrics"])
    assert done.exit_code == 0 and "goodput_per_s" in done.output
    assert "bench" in CliRunner().invoke(cli, ["--help"]).output
    assert CliRunner().invoke(cli, ["nothing"]).exit_code == 2
    looked.clear()
    assert CliRunner().invoke(cli, ["version"]).exit_code == 0
    assert looked == [], "a command of our own looks for no others"


def test_serve_pays_nothing_for_the_benchmark() -> None:
    code = "import sys, cluster.cli; print([name for name in sys.modules if name.split('.')[0] == 'bench'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_of_bench_imports_nothing_heavy() -> None:
    code = "import sys, bench.cli; print([name for name in ('numpy', 'uvloop', 'pydantic', 'matplotlib') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_stack_that_fails_takes_no_measurement_with_it(mock_url: StartMock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = mock_url()

    @contextlib.contextmanager
    def opened(options: ServerOptions) -> Iterator[Server]:
        if options.settings:
            raise StackError("no memory for it")
        yield Server(url, PromptStyle("mock"))

    monkeypatch.setattr("bench.run_command.open_server", opened)
    status, text = said("run", "-w", "a", "--requests", "2", "--change", "max_num_seqs=8", "--out", str(tmp_path))
    assert status == 1 and "max_num_seqs=8 drops out: no memory for it" in text
    assert [point.label for point in load_result(next(tmp_path.glob("run-a-*.json"))).points] == ["baseline"]
    monkeypatch.setattr("bench.ladder_command.open_server", opened)
    assert said("ladder", "--requests", "2", "--out", str(tmp_path))[0] == 1, "nothing was measured at all"


ENDED = """
import contextlib, sys, time
from bench import cli, run_command
@contextlib.contextmanager
def opened(options):
    try:
        print("started", flush=True)
        time.sleep(60)
        yield
    finally:
        print("stopped", flush=True)
run_command.open_server = opened
sys.argv = ["bench", "run"]
cli.app()
"""


def test_sigterm_stops_what_was_started() -> None:
    with subprocess.Popen([sys.executable, "-c", ENDED], stdout=subprocess.PIPE, text=True, cwd=ROOT) as run:
        assert run.stdout is not None
        said_first = [run.stdout.readline() for _ in range(3)]
        assert said_first[-1] == "started\n" and "the requests become due over" in said_first[0]
        run.send_signal(signal.SIGTERM)
        assert run.stdout.read() == "stopped\ninterrupted before any measurement was finished: nothing is written\n"
        assert run.wait(20) == 128 + signal.SIGTERM


IN_A_CALLBACK = """
import asyncio, signal, sys, uvloop
from bench.usage import end_on_sigterm, run_loop
class Told(asyncio.Protocol):
    def data_received(self, data):
        signal.raise_signal(signal.SIGTERM)
async def main():
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Told, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"now")
    await asyncio.sleep(2)
end_on_sigterm()
{"run_loop": run_loop, "uvloop.run": uvloop.run}[sys.argv[1]](main())
"""


@pytest.mark.parametrize(("run", "status"), [("run_loop", 143), ("uvloop.run", 0)])
def test_sigterm_in_a_callback_is_not_swallowed(run: str, status: int) -> None:
    """The second is the control: the exception of the handler is the protocol's, and ends nothing."""
    done = subprocess.run([sys.executable, "-c", IN_A_CALLBACK, run], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert done.returncode == status


@pytest.mark.parametrize(
    ("number", "status", "streams", "token_ms"),
    [(signal.SIGTERM, 143, 8, 0.1), (signal.SIGINT, 130, 8, 0.1), (signal.SIGTERM, 143, 2_000, 100.0)],
)
def test_a_signal_ends_a_run_in_the_middle_of_its_streams(
    mock_url: StartMock, tmp_path: Path, number: int, status: int, streams: int, token_ms: float
) -> None:
    url = mock_url(Pace(token_ms=token_ms))
    asked = ["-m", "bench.cli", "run", "-w", "a", "--requests", "100000", "--streams", str(streams), "--url", url, "--out", str(tmp_path)]
    interruptible = "import signal, runpy, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.argv = sys.argv[1:]; "
    command = [sys.executable, "-c", f"{interruptible}runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)", *asked[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as run:
        assert run.stdout is not None and "measuring" in run.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            run.wait(2 if streams < 100 else 5)  # it runs until it is told to end; the warm-up of many is over by then
        run.send_signal(number)
        assert run.wait(60) == status
        assert run.stdout.read() == "interrupted before any measurement was finished: nothing is written\n"
    assert not list(tmp_path.iterdir()), "nothing was finished"


def test_what_is_finished_is_kept_when_a_run_is_interrupted(mock_url: StartMock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, measured = run_command.measure, iter([None, KeyboardInterrupt()])

    def measure(*asked: Any, **named: Any) -> Measured:
        if (end := next(measured)) is not None:
            raise end
        return real(*asked, **named)

    monkeypatch.setattr(run_command, "measure", measure)
    status, text = said("run", "-w", "a", "-w", "b", "--requests", "2", "--url", mock_url(), "--out", str(tmp_path))
    assert status == 130 and "interrupted: 1 of 2 measurements are finished, and kept" in text
    assert [point.workload.name for point in load_result(next(tmp_path.glob("run-a-*.json"))).points] == ["a"]


@pytest.mark.parametrize(("page", "given", "replicas", "told"), [
    ("rantang:replicas 2\n", (), 2, "it has 2 replicas"),
    ("other 1\n", (), 1, "does not say how many replicas"),
    ("rantang:replicas 2\n", ("--replicas", "3"), 3, ""),
])  # fmt: skip
def test_a_running_server_is_asked_how_many_replicas_are_paid(
    mock_url: StartMock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, given: tuple[str, ...], replicas: int, told: str
) -> None:
    real = stack.get_text
    monkeypatch.setattr(stack, "get_text", lambda url, *rest, **named: page if "/metrics" in url else real(url, *rest, **named))
    asked = ("-w", "a", "--requests", "2", "--price-per-hour", "1", "--url", mock_url(), "--out", str(tmp_path), *given)
    status, text = said("run", *asked)
    assert status == 0 and told in text and ("replicas" in text) == bool(told)
    point = load_result(next(tmp_path.glob("run-a-*.json"))).points[0]
    assert (point.served.replicas, point.repeats[0].scorecard.cost.replicas) == (replicas, replicas)


def test_an_slo_is_written_as_everywhere(mock_url: StartMock, tmp_path: Path) -> None:
    asked = ("run", "-w", "a", "--requests", "1", "--url", mock_url(), "--out", str(tmp_path), "--slo", "ttft_ms=2000,queue_ms=50")
    status, text = said(*asked)
    assert status == 0, text
    assert load_result(next(tmp_path.glob("run-a-*.json"))).points[0].slo == Slo(ttft_ms=2000.0, queue_ms=50.0)
    assert "p95 of queue time not measured in 1 of 1 runs" in text
    status, text = said(*asked, "--slo-e2e-ms", "5")
    assert status == 2 and "leave the single ones out" in text
