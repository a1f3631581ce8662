"""Peers side by side, shown on a mock that starts a child: figures, ratios, skipped ones, and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from bench import processes
from bench.cli import app
from bench.load_client import Call
from bench.peers import comparison, contestant, main, work_runs
from bench.peers.comparison import AGAIN, Column, column_of, compare, metrics_of, ratio
from bench.peers.contestant import Contestant, Running
from bench.peers.home import Home, PeerError
from bench.peers.main import contestant_of
from bench.peers.peer import Prompts
from bench.peers.same_model import SameModel
from bench.peers.table import markdown_of
from bench.record import RequestRecord
from bench.result import ROOT, WorkResult, load_result
from bench.workloads import workload
from bench.works import Work
from tests.bench.peers.fake_peer import FakePeer

WORK = Work("b", streams=2, prompt_tokens=8, output_tokens=4, requests=4)


async def measure(one: Contestant, url: str) -> tuple[WorkResult, ...]:
    return await work_runs.measure(url, [WORK], one.prompts, 0)


async def unchecked(one: Contestant, url: str) -> SameModel | None:
    return None


@pytest.fixture
def fake(tmp_path: Path) -> FakePeer:
    peer = FakePeer(tmp_path / "fake.py")
    peer.install(Home(tmp_path))
    return peer


def children() -> list[processes.Process]:
    return [process for process in processes.family(os.getpid()) if "time.sleep(300)" in process.title]


def column(peer: FakePeer, tmp_path: Path) -> Column:
    return column_of(contestant.of_peer(peer, Home(tmp_path)), measure, unchecked)


def test_a_peer_is_measured_and_nothing_of_it_is_left(fake: FakePeer, tmp_path: Path) -> None:
    found = column(replace(fake, mode="careless"), tmp_path)
    assert found.version == "fake 1.0" and found.notes == ("without wings",) and not found.skipped
    assert found.works[0].summary.completed == 4 and found.figure("b") is not None
    assert found.command.startswith("FAKE=1 ") and str(tmp_path) not in found.command
    assert found.start_s is not None and found.idle_mib is not None and found.idle_mib > 5
    assert children() == []


async def test_a_second_comparison_repeats_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server at a URL keeps its cache between two comparisons."""
    sent: list[bytes] = []

    async def kept(client: object, calls: list[Call], *, streams: int) -> list[RequestRecord]:
        sent.extend(call.body for call in calls)
        return []

    monkeypatch.setattr(work_runs, "closed_loop", kept)
    for _ in range(2):
        await work_runs.measure("http://127.0.0.1:9", [WORK], Prompts(), 0)
    assert len(sent) == len(set(sent)) > 0


def test_a_url_is_asked_for_the_model_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.server.stack.get_text", lambda url, api_key="": '{"data": [{"id": "another"}]}')
    assert contestant_of("http://127.0.0.1:9/v1", Home(tmp_path)).prompts.model == "another"
    monkeypatch.setattr("bench.server.stack.get_text", lambda url, api_key="": "{}")
    assert contestant_of("http://127.0.0.1:9", Home(tmp_path)).prompts.model == Prompts().model


def test_a_server_that_lies_lends_no_ratio(fake: FakePeer, tmp_path: Path) -> None:
    found = column(replace(fake, mode="usage_too_high"), tmp_path)
    assert found.works[0].summary.errors == 4
    assert found.figure("b") is None and ratio(100.0, found.figure("b"), "b") is None


def test_text_of_another_length_lends_no_ratio(fake: FakePeer, tmp_path: Path) -> None:
    """More of a prompt to compute is no slowness; a begin token more is the server's own affair."""
    found = column(fake, tmp_path)
    for off, counts in ((40.0, False), (-40.0, False), (1.5, True)):
        summary = replace(found.works[0].summary, text_off_percent=off)
        other = replace(found, works=(replace(found.works[0], summary=summary),))
        assert (other.figure("b") is not None) is counts
        assert ("% of tokens" in markdown_of([other], ["ours"], [WORK])) is not counts


@pytest.mark.parametrize(
    ("mode", "why"), [("broken", "exit code 1"), ("mute", "not ready after 1 s")], ids=["dies at the start", "never ready"]
)
def test_a_peer_that_does_not_start_is_skipped_with_the_reason(fake: FakePeer, tmp_path: Path, mode: str, why: str) -> None:
    found = column(replace(fake, mode=mode, start_timeout_s=1.0 if mode == "mute" else 20.0), tmp_path)
    assert why in found.skipped and found.works == ()
    assert children() == []


def test_a_peer_that_is_not_installed_is_skipped(tmp_path: Path) -> None:
    assert column(FakePeer(tmp_path / "absent.py"), tmp_path).skipped == "not installed: nowhere"


def test_a_failure_in_the_measurement_stops_the_server(fake: FakePeer, tmp_path: Path) -> None:
    async def fail(one: Contestant, url: str) -> tuple[WorkResult, ...]:
        assert children()  # the control: it runs while it is measured
        raise RuntimeError("the client broke")

    with pytest.raises(RuntimeError, match="the client broke"):
        column_of(contestant.of_peer(fake, Home(tmp_path)), fail, unchecked)
    assert children() == []


INTERRUPTED = """
import signal, sys
from pathlib import Path
from bench import usage
from bench.peers import comparison, contestant
from bench.peers.home import Home
from tests.bench.peers.fake_peer import FakePeer
usage.end_on_sigterm()
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests in the background had it ignored
async def measure(one, url):
    import asyncio
    print("measuring", flush=True)
    await asyncio.sleep(300)
async def unchecked(one, url):
    return None
comparison.column_of(contestant.of_peer(FakePeer(Path(sys.argv[1])), Home(Path("."))), measure, unchecked)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["Ctrl-C", "SIGTERM", "SIGKILL"])
def test_an_interrupted_comparison_leaves_no_server(fake: FakePeer, number: signal.Signals) -> None:
    """After SIGKILL nobody is left to stop the server: it is told that its parent ended."""
    command = [sys.executable, "-c", INTERRUPTED, str(fake.script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as run:
        assert run.stdout is not None and run.stdout.readline() == "measuring\n"
        family = [process for process in processes.family(run.pid) if process.pid != run.pid]
        assert len(family) == 2
        run.send_signal(number)
        run.wait(30)
    deadline_s = time.monotonic() + 10
    while processes.alive(family) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert processes.alive(family) == []


def test_ours_runs_first_and_last_and_the_drift_shows(fake: FakePeer, tmp_path: Path) -> None:
    own = replace(contestant.of_peer(fake, Home(tmp_path)), name="rantang")
    other = replace(own, name="other")
    absent = contestant.of_peer(FakePeer(tmp_path / "absent.py", name="absent"), Home(tmp_path))
    columns = list(compare([own], [other, absent], measure, unchecked, lambda _: None))
    assert [each.name for each in columns] == ["rantang", "other", "absent", "rantang" + AGAIN]
    names = {metric.name for metric in metrics_of(columns, ["rantang"], [WORK])}
    assert names == {"rantang/other.b", "rantang.drift.b"}
    outcome = comparison.result_of(columns, ["rantang"], [WORK], {})
    assert [work.name for work in outcome.works] == ["rantang/b", "other/b", "rantang again/b"]
    assert b"fake 1.0" in msgspec.json.encode(outcome)
    table = markdown_of(columns, ["rantang"], [WORK])
    assert "| work |  | rantang | other | rantang again |" in table
    assert "* absent: skipped, not installed: nowhere" in table and "4/4" in table


def test_servers_finished_before_a_signal_are_kept(fake: FakePeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = replace(contestant.of_peer(fake, Home(tmp_path)), name="rantang")

    def interrupted(*asked: Any) -> Iterator[Column]:
        yield from compare([own], [], measure, unchecked, lambda _: None)
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "compare", interrupted)
    monkeypatch.setattr(main, "check_of", lambda reference, home: unchecked)
    monkeypatch.setattr(main, "report_too", lambda path, console: ())
    with pytest.raises(KeyboardInterrupt):
        main.compare(main.Request((), "b", "", ("rantang=",), "", 0, tmp_path / "out"), tmp_path)
    (path,) = (tmp_path / "out").glob("peers-*.json")
    found = load_result(path)
    assert [work.name for work in found.works] == ["rantang/b"] and path.with_suffix(".md").exists()
    assert found.configuration["hashes"] == f"b={workload('b').hash()}" and found.configuration["repeats"] == "1"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--out", "/proc/nope", "--peers", ""), "no result can be written to /proc/nope"),
        (("--peers", "vllm,vllm"), "'vllm' is given twice"),
        (("--ours", "a=--replicas 1", "--ours", "a=--replicas 2", "--peers", ""), "'a' is given twice"),
        (("--ours", "a again=", "--peers", ""), "a name cannot end in ' again'"),
        (("--works", "a", "--works", "b"), "--works is given twice"),
        (("--works", "z"), "unknown work z"),
        (("--peers", "ftp://x"), "not an http(s) URL: 'ftp://x'"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], why: str
) -> None:
    monkeypatch.setattr(comparison, "compare", lambda *asked: pytest.fail("started"))
    given = arguments if "--out" in arguments else ("--out", str(tmp_path), *arguments)
    done = CliRunner().invoke(app, ["peers", *given])
    assert done.exit_code == 2 and why in " ".join(done.output.split())


def test_ratios_say_who_is_better() -> None:
    assert ratio(200.0, 100.0, "b") == 2.0
    assert ratio(1000.0, 1500.0, "e") == 1.5  # e: time to first token, theirs over ours
    assert ratio(None, 100.0, "b") is None and ratio(100.0, 0.0, "b") is None


def test_a_url_is_taken_as_it_is() -> None:
    one = contestant.of_url("http://127.0.0.1:9", FakePeer(Path()).prompts)
    with one.run() as running:
        assert running == Running("http://127.0.0.1:9", "not known", "http://127.0.0.1:9")


def test_a_port_that_cannot_be_used_is_a_reason_too(tmp_path: Path) -> None:
    def start() -> Iterator[None]:
        raise OSError("no such program")

    with pytest.raises(PeerError, match="no such program"), contestant._stopped(start):  # type: ignore[arg-type]
        pass
