"""Replicas that say what cannot be, and clocks that jump: ignored with a reason, never a crash, never a stuck queue."""

from __future__ import annotations

import math
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.contract.messages import FinishReason, LoadReport, StepTimeCoefficients
from router.config import RouterConfig
from router.policy import fleet as fleet_module
from router.policy.report_check import limits_fault, load_fault
from router.policy.request_view import RequestView
from router.status import pool_totals
from tests.router.modelled_replica import ModelledReplica, Running, limits
from tests.router.virtual_world import World, prompt_of, request

CONFIG = RouterConfig(queue_time_slo_s=5.0)
NAN = float("nan")

LIES: list[tuple[str, dict[str, object]]] = [
    ("negative_load", {"running": -5}),
    ("negative_load", {"queued_prefill_tokens": -1}),
    ("impossible_load", {"free_blocks": 10**9}),
    ("impossible_load", {"waiting": 2**60}),
    ("step_time", {"predicted_step_s": NAN}),
    ("step_time", {"predicted_step_s": -1.0}),
    ("step_time", {"step_time": StepTimeCoefficients(math.inf, 0.0, 0.0, 0.0)}),
    ("step_time", {"step_time": StepTimeCoefficients(-1.0, 0.0, 0.0, 0.0)}),
    ("step_time", {"step_spread": NAN}),
    ("step_time", {"step_spread": -0.1}),
    ("step_time", {"step_spread": 1.5}),
    ("step_time", {"busy_s": NAN}),
    ("step_time", {"foreseen_s": math.inf}),
    ("progress", {"progress": 0}),
]


def two(config: RouterConfig = CONFIG) -> World:
    world = World(config, [ModelledReplica(f"r{i}") for i in range(2)])
    for one in world.replicas.values():
        one.progress = 1000
    world.run(1.0)
    return world


def lying(world: World, name: str, change: dict[str, object]) -> None:
    """From now on every report of this replica says so."""
    replica = world.replicas[name]
    honest = replica.load
    replica.load = lambda: msgspec.structs.replace(honest(), **change)  # type: ignore[method-assign]


@pytest.mark.parametrize(("reason", "change"), LIES)
def test_a_lie_is_counted_and_everyone_is_served(reason: str, change: dict[str, object]) -> None:
    world = two()
    lying(world, "r0", change)
    outcomes = []
    for i in range(40):
        world.at(1.0 + i * 0.05, lambda i=i: outcomes.append(world.arrive(request(f"q{i}", prompt_of(i, 200), max_tokens=20))))
    world.run(60.0)
    assert world.board.fleet.lies.counts[reason] > 0
    assert all(one.finishes() == [FinishReason.LENGTH] and one.tokens() == one.expected() for one in outcomes)
    assert (world.own(), len(world.board.reception.queue)) == (0, 0)
    totals = {(one.name, dict(one.labels).get("reason")): one.value for one in pool_totals(world.board, world.now)}
    assert totals["untrue_reports", reason] > 0


def test_believed_it_would_break_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the least predicted time of a replica with a negative queue is below all others."""
    monkeypatch.setattr(fleet_module, "load_fault", lambda *_: None)
    world = two()
    lying(world, "r0", {"predicted_step_s": NAN, "step_time": StepTimeCoefficients(NAN, 0.0, 0.0, 0.0)})
    world.run(2.0)
    numbers = [one.wait_s(0.98, world.now) for one in world.board.fleet.outlays(_view(), world.board.fleet.all(), world.now)]
    forecasts = [one.candidate.forecast.ttft_s for one in world.board.fleet.outlays(_view(), world.board.fleet.all(), world.now)]
    assert any(math.isnan(one) for one in (*numbers, *forecasts))


def test_who_lies_at_the_door_is_not_used() -> None:
    world = two()
    for bad in (limits(block_size=0), limits(num_blocks=-1), limits(step_slo_s=NAN), limits(max_num_seqs=0)):
        welcome = msgspec.structs.replace(ModelledReplica("bad").welcome(), limits=bad)
        incarnation, _ = world.board.connected(welcome, world.now)
        assert incarnation is None
    assert world.board.fleet.lies.counts["limits"] == 4
    assert len(world.board.fleet.all()) == 2


def test_facts_of_a_first_delta_that_cannot_be_teach_nothing() -> None:
    world = two()
    outcome = world.arrive(request("q", prompt_of(1, 100), max_tokens=5))
    ((_, stream),) = world.board.traffic.attempts.values()
    assert stream.incarnation is not None
    replica = world.replicas[stream.incarnation.replica_id]
    token = outcome.expected()[0]
    delta = msgspec.structs.replace(replica._token(_running(replica)), waited_s=-3.0, cached_tokens=-7)
    assert delta.token_ids == (token,)
    world._tell(replica, replica.frame([delta]))
    assert world.board.fleet.lies.counts == {"waited": 1}
    assert world.board.fleet.hits_actual_tokens == 0
    assert outcome.tokens() == [token]
    assert outcome.deltas[0].queue_time_s is None


def _running(replica: ModelledReplica) -> Running:
    replica.begin(1.0)
    (one,) = replica.running
    return one


def test_another_epoch_and_an_old_sequence_change_nothing() -> None:
    world = two()
    replica, incarnation = world.replicas["r0"], world.incarnations["r0"]
    before = world.board.fleet.get(incarnation)
    assert before is not None
    report = before.view.load
    for epoch in (0, 2, 2**40):
        frame = msgspec.structs.replace(replica.frame(), epoch=epoch, load=msgspec.structs.replace(report, running=77))
        assert world.board.frame(incarnation, frame, world.now) == []
    assert before.view.load.running == 0
    assert world.board.fleet.lies.counts == {"epoch": 3}
    index = world.board.fleet.index
    old = msgspec.structs.replace(replica.frame(), sequence=-5, batches=1)
    asked = [bool(world.board.frame(incarnation, old, world.now)) for _ in range(8)]
    assert asked == [False] * 7 + [True], "our own number may be the wrong one: a snapshot settles it"
    assert index.stale == 8


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6))
def test_clocks_that_jump_leave_nobody_behind(seed: int) -> None:
    """Readings of the clock step back and forth; every request still has its one outcome and nothing is left over."""
    random = Random(seed)
    world = two()
    board, skew = world.board, [0.0]

    def jump() -> None:
        skew[0] = random.choice((0.0, -30.0, 0.7, 5.0, -1e6))

    for name in ("arrive", "frame", "tick"):
        method = getattr(board, name)
        setattr(board, name, lambda *args, method=method: method(*args[:-1], args[-1] + skew[0]))
    for i in range(30):
        world.at(1.0 + random.random() * 5, lambda i=i: world.arrive(request(f"q{i}", prompt_of(i, 150), max_tokens=20)) and None)
    for _ in range(6):
        world.at(1.0 + random.random() * 5, jump)
    world.at(7.0, lambda: skew.__setitem__(0, 0.0))
    world.run(45.0)
    assert all(one.ended for one in world.outcomes.values())
    assert (world.own(), len(board.reception.queue), len(board.traffic.dispatches)) == (0, 0, 0)
    for one in world.outcomes.values():
        assert one.tokens() == one.expected()[: len(one.tokens())]


NUMBERS = st.one_of(st.integers(-(2**62), 2**62), st.integers(-3, 5000))
TIMES = st.one_of(st.floats(), st.floats(0, 1))


@settings(max_examples=100, deadline=None)
@given(st.lists(NUMBERS, min_size=7, max_size=7), st.lists(TIMES, min_size=6, max_size=6))
def test_whatever_passes_the_check_can_be_computed_with(counts: list[int], times: list[float]) -> None:
    """Any report: refused, or every forecast made of it is a finite number, not below zero."""
    load = LoadReport(*counts, step_time=StepTimeCoefficients(*times[:5]), predicted_step_s=times[5])
    world = two()
    known = world.board.fleet.all()[0]
    if load_fault(load, known.view.limits) is not None:
        return
    known.view.report(load, (), world.now)
    assert limits_fault(known.view.limits) is None
    for one in world.board.fleet.outlays(_view(), world.board.fleet.all(), world.now):
        forecast = one.candidate.forecast
        numbers = (forecast.wait_s, forecast.ttft_s, forecast.tpot_s, forecast.service_s, forecast.idle_s, one.wait_s(0.98, world.now))
        assert all(math.isfinite(each) and each >= 0 for each in numbers)


def _view() -> RequestView:

    return RequestView(100, (), 10)
