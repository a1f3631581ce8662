"""Sweeps against a server made up, and one against a mock: loads, resuming, refusing, time to go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.hours import spoken
from bench.load import BURST_RATE_PER_S, Load
from bench.measurement import Question
from bench.mock_openai import Fault, Pace
from bench.point import Point
from bench.quantiles import Spread
from bench.request_log import RequestRow
from bench.server import ServerOptions
from bench.slo import Slo
from bench.sweep.carry_out import begin, carry_out
from bench.sweep.eta import eta_s
from bench.sweep.plan import SweepOptions, plan_sweep, slug
from bench.sweep.runner import Extent, Sweep
from bench.sweep.state import FILE, ResumeError, SweepState, resume
from tests.bench.made_up_results import card, point, rows_for
from tests.bench.served_mock import served_mock

IDENTITY = {"workload": "chat 01", "slo": "ttft ≤ 1 ms"}
CAPACITY = 3.3


class MadeUp:
    """Keeps every load up to its capacity; `dies_at`: the measurement that is interrupted."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.asked: list[float] = []
        self._dies_at = dies_at

    def __call__(self, load: Load) -> tuple[Point, list[RequestRow]]:
        rate = load.rate_per_s or 0.0
        if len(self.asked) == self._dies_at:
            raise KeyboardInterrupt
        self.asked.append(rate)
        done = min(rate, CAPACITY)
        measured = replace(card(done, 100.0 * min(1.0, CAPACITY / rate) ** 2), offered_per_s=rate)
        return point([measured], rate=rate), rows_for(0, 3)


def swept(folder: Path, server: MadeUp, rates: tuple[float, ...] = (), said: list[str] | None = None) -> SweepState:
    state = resume(folder, IDENTITY)
    Sweep(state, Extent(20, 1, rates, burst=not rates), server, (said if said is not None else []).append).run()
    return state


def test_auto_begins_below_ends_above_and_closes_in(tmp_path: Path) -> None:
    server, said = MadeUp(), list[str]()
    state = swept(tmp_path / "s", server, said=said)
    assert server.asked[0] == BURST_RATE_PER_S
    assert min(server.asked) < 0.3 * CAPACITY and sorted(server.asked)[-2] > CAPACITY
    assert len(server.asked) == len(set(server.asked)) == len(state.points)
    knee = Sweep(state, Extent(20, 1), server, said.append).knee
    assert knee.found and knee.load_per_s is not None and knee.broken_per_s is not None
    assert knee.load_per_s <= 1.03 * CAPACITY < 1.2 * knee.broken_per_s
    assert any("closing in" in line for line in said) and any("left for" in line for line in said)


def test_given_rates_are_all_and_no_more(tmp_path: Path) -> None:
    server = MadeUp()
    swept(tmp_path / "s", server, (1.0, 2.0, 4.0))
    assert server.asked == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("dies_at", [0, 1, 4, 7])
def test_an_interrupted_sweep_goes_on_and_repeats_nothing(tmp_path: Path, dies_at: int) -> None:
    whole = MadeUp()
    expected = swept(tmp_path / "whole", whole)
    first = MadeUp(dies_at)
    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path / "s", first)
    second = MadeUp()
    state = swept(tmp_path / "s", second)
    assert first.asked + second.asked == whole.asked
    assert [each.load for each in state.points] == [each.load for each in expected.points]
    assert state.rows() == expected.rows()
    assert {row.point for row in state.rows()} == set(range(len(state.points)))
    third = MadeUp()
    swept(tmp_path / "s", third)
    assert third.asked == []


def test_a_load_that_says_nothing_is_not_kept(tmp_path: Path) -> None:
    """Else every later run would fail at it at once, long after the server is well again."""

    def silent(load: Load) -> tuple[Point, list[RequestRow]]:
        nothing = card(attainment=0.0)
        return point([replace(nothing, summary=replace(nothing.summary, completed_per_s=0.0, errors=20))], rate=load.rate_per_s), []

    for rates in ((), (1.0, 2.0)):
        with pytest.raises(ValueError, match="nothing was answered"):
            Sweep(resume(tmp_path / "s", IDENTITY), Extent(20, 1, rates), silent, lambda line: None).run()
        assert resume(tmp_path / "s", IDENTITY).points == []
    assert swept(tmp_path / "s", MadeUp()).points


def test_a_queue_target_needs_a_server_that_tells_queue_time(tmp_path: Path) -> None:
    def asked(load: Load, queue: Spread) -> tuple[Point, list[RequestRow]]:
        return point([card(queue_ms=queue)], rate=load.rate_per_s, slo=Slo(queue_ms=50.0)), []  # type: ignore[arg-type]

    state = resume(tmp_path / "s", IDENTITY)
    with pytest.raises(ValueError, match="does not tell its queue time"):
        Sweep(state, Extent(20, 1, (1.0,)), lambda load: asked(load, Spread()), lambda line: None).run()
    assert state.points == []
    knee = Sweep(state, Extent(20, 1, (1.0,)), lambda load: asked(load, Spread(10.0, 80.0, 90.0)), lambda line: None).run()
    assert (knee.load_per_s, knee.broken_per_s) == (None, 1.0)


def test_another_sweep_is_refused_with_what_differs(tmp_path: Path) -> None:
    swept(tmp_path / "s", MadeUp(), (1.0,))
    assert len(resume(tmp_path / "s", dict(reversed(IDENTITY.items()))).points) == 1, "the order of what is the same says nothing"
    with pytest.raises(ResumeError, match="workload: chat 01 there, chat 02 here"):
        resume(tmp_path / "s", {**IDENTITY, "workload": "chat 02"})
    with pytest.raises(ResumeError, match="setting max_num_seqs: not set there, 8 here"):
        resume(tmp_path / "s", {**IDENTITY, "setting max_num_seqs": "8"})


def test_a_broken_state_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    swept(folder, MadeUp(), (1.0,))
    requests = folder / "0.requests.jsonl.gz"
    requests.write_bytes(requests.read_bytes()[:-4])
    with pytest.raises(ResumeError, match=r"0\.requests\.jsonl\.gz.*cannot be read"):
        resume(folder, IDENTITY)
    requests.unlink()
    with pytest.raises(ResumeError, match="lacks the requests of point 0"):
        resume(folder, IDENTITY)
    (folder / FILE).write_text("{")
    with pytest.raises(ResumeError, match="cannot be read"):
        resume(folder, IDENTITY)


def test_time_to_go() -> None:
    assert eta_s((1.0, 2.0), 20, 1, ()) == 30.0
    assert eta_s((1.0,), 20, 3, (4.0, 6.0)) == 75.0
    assert [spoken(each) for each in (0.4, 45, 200, 3_900, 183_700)] == ["0 s", "45 s", "3 min 20 s", "1 h 5 min", "2 days 3 h"]


def options(url: str | None, folder: Path) -> SweepOptions:
    server = ServerOptions(url, timeout_s=20.0)
    return SweepOptions("chat", Slo(ttft_ms=2_000.0), server, "200,400", requests=20, folder=folder)


def test_what_makes_two_sweeps_different(tmp_path: Path) -> None:
    plain = plan_sweep(options(None, tmp_path))
    others = (
        replace(plain.options, seed=1),
        replace(plain.options, slo=Slo(ttft_ms=1.0)),
        replace(plain.options, server=ServerOptions(settings={"max_num_seqs": "8"})),
        replace(plain.options, repeats=2),
        replace(plain.options, rates="1"),
        replace(plain.options, requests=21),
        replace(plain.options, server=ServerOptions("http://127.0.0.1:9")),
    )
    assert all(plan_sweep(each).identity != plain.identity for each in others)
    assert plan_sweep(replace(plain.options, folder=tmp_path / "x")).identity == plain.identity
    assert slug("replicas=2,a=1") != slug("replicas=2,a=2") and "/" not in slug("a/b") and slug("baseline") == "baseline"
    for bad, words in (({"rates": "0"}, "positive"), ({"repeats": 0}, "at least 1"), ({"workload": "chess"}, "there are chat")):
        with pytest.raises(ValueError, match=words):
            plan_sweep(replace(plain.options, **bad))  # type: ignore[arg-type]


def test_against_a_mock_and_again(tmp_path: Path) -> None:
    with served_mock(Pace(5.0, 1.0)) as url:
        plan = plan_sweep(options(url, tmp_path))
        said: list[str] = []
        done = carry_out(plan, begin(plan, restart=False), said.append)
        assert [each.load.rate_per_s for each in done.points] == [200.0, 400.0, BURST_RATE_PER_S]
        assert all(each.figure("attainment_percent") == 100.0 for each in done.points)
        assert [row.point for row in done.rows] == [0] * 20 + [1] * 20 + [2] * 20
        assert done.knee.load_per_s == 400.0 and not done.knee.found
        assert plan.state_folder.is_dir()
        again: list[str] = []
        carry_out(plan, begin(plan, restart=False), again.append)
        assert sum("already measured" in line for line in again) == 3
        assert begin(plan, restart=True).points == []


def test_an_attempt_sends_no_text_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interrupted load sent lies in the server's cache: sent again, it would be found there."""
    salts: list[str] = []

    def interrupted(server: object, question: Question, **_: object) -> None:
        salts.append(question.salt)
        raise KeyboardInterrupt

    monkeypatch.setattr("bench.sweep.carry_out.measure", interrupted)
    with served_mock() as url:
        plan = plan_sweep(options(url, tmp_path))
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                carry_out(plan, begin(plan, restart=False), lambda line: None)
    assert len(set(salts)) == 2 and all(salts)


def test_who_interrupts_is_told_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Sweep) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Sweep, "run", interrupted)
    said: list[str] = []
    with served_mock() as url:
        plan = plan_sweep(options(url, tmp_path))
        with pytest.raises(KeyboardInterrupt):
            carry_out(plan, begin(plan, restart=False), said.append)
    assert "the same command goes on" in said[-1]


def test_a_server_that_refuses_everything_has_no_loads_to_find(tmp_path: Path) -> None:
    with served_mock(fault=Fault.SHED) as url:
        plan = plan_sweep(replace(options(url, tmp_path), rates="auto"))
        with pytest.raises(ValueError, match=r"refused every request.*--rates"):
            carry_out(plan, begin(plan, restart=False), lambda line: None)
