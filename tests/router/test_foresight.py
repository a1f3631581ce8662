"""Refusals before any text is read: only where no prompt could be served in time, and counted like the others."""

import math
from typing import Any

import msgspec
import pytest

from replica.contract.messages import Frame
from router.config import RouterConfig
from router.policy.admission import RETRY_AFTER_MAX_S, Admission
from router.policy.classes import Terms
from router.policy.foresight import Foresight
from router.reception import Reception
from tests.router.modelled_replica import CPU, ModelledReplica, limits
from tests.router.virtual_world import HEARTBEAT_S, World, prompt_of, request

CONFIG = RouterConfig(queue_time_slo_s=2.0)


def prove(world: World) -> None:
    """Some calm requests, so that the replicas' models are believed."""
    for i in range(24):
        world.arrive(request(f"calm{i}", prompt_of(1000 + i, 50), max_tokens=2))
        world.run(world.now + 1.0)


def busy_world() -> World:
    """One replica with more work than fits into the SLO; another router's."""
    world = World(CONFIG, [ModelledReplica("r0", truth=CPU)])
    prove(world)
    for i in range(30):
        world.replicas["r0"].submit(msgspec.structs.replace(request(f"b{i}", prompt_of(i, 400)), attempt=1_000_000 + i), world.now)
    world.run(world.now + HEARTBEAT_S)
    return world


def test_where_everything_is_hopeless_it_is_said_before_the_text_is_read() -> None:
    world = busy_world()
    refusal = world.board.reception.foresee(world.now, None, 400, world.now)
    assert refusal is not None
    assert (refusal.status, refusal.reason) == (429, "queue_time")
    assert refusal.retry_after_s is not None and refusal.retry_after_s > 1
    arrived = world.arrive(request("q", prompt_of(99, 400)))
    assert arrived.rejected is not None, "the answer of a request that was read is the same"
    assert arrived.rejected.reason == refusal.reason


def test_those_turned_away_are_told_to_come_back_one_after_another() -> None:
    world = busy_world()
    told = [world.board.reception.foresee(world.now, None, 400, world.now) for _ in range(20)]
    seconds = [refusal.retry_after_s or 0.0 for refusal in told if refusal is not None]
    assert len(seconds) == 20
    assert seconds[-1] - seconds[0] > 19 * 400 / 1_200 / 2, "each before it takes its turn"


def test_a_longer_promise_is_not_foreseen_to_break() -> None:
    world = busy_world()
    assert world.board.reception.foresee(world.now, Terms(queue_time_slo_s=100.0), 400, world.now) is None


@pytest.mark.parametrize("arrived_ago_s", [0.0, 1_000.0])
def test_an_empty_replica_and_no_replica_are_left_to_the_arrival(arrived_ago_s: float) -> None:
    empty = World(CONFIG, [ModelledReplica("r0", truth=CPU)])
    empty.run(1.0)
    assert empty.board.reception.foresee(empty.now - arrived_ago_s, None, 400, empty.now) is None
    assert World(CONFIG, []).board.reception.foresee(0.0, None, 400, 0.0) is None


def test_what_is_foreseen_never_takes_more_than_the_arrival_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Burst by burst: whoever foresight refuses, `arrive` refuses too; and the other way round for the shortest prompt."""
    world = World(CONFIG, [ModelledReplica("r0", truth=CPU), ModelledReplica("r1", truth=CPU)])
    prove(world)
    foreseen = 0
    for i in range(60):
        refusal = world.board.reception.foresee(world.now, None, 400, world.now)
        outcome = world.arrive(request(f"q{i}", prompt_of(i, 400)))
        foreseen += refusal is not None
        assert refusal is None or outcome.rejected is not None
        if i % 7 == 6:
            world.run(world.now + 0.1)
    assert 20 < foreseen < 60
    monkeypatch.setattr(Reception, "foresee", lambda self, *rest: None)
    assert world.board.reception.foresee(world.now, None, 400, world.now) is None, "the control"


def test_of_many_replicas_a_few_are_asked_and_all_before_anyone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(CONFIG, [ModelledReplica(f"r{i}", truth=CPU) for i in range(40)])
    for replica in world.replicas.values():
        world.arrive(request(f"warm {replica.replica_id}", prompt_of(7, 40)))
    for i in range(200):
        world.arrive(request(f"q{i}", prompt_of(i, 40), max_tokens=400))  # nobody is idle
    fleet, reception = world.board.fleet, world.board.reception
    asked: list[int] = []
    outlays = fleet.outlays

    def counted(*arguments: Any, **options: Any) -> Any:
        found = outlays(*arguments, **options)
        asked.append(len(found))
        return found

    monkeypatch.setattr(fleet, "outlays", counted)
    assert reception.foresee(world.now, None, 400, world.now) is None
    assert asked == [1], "one that has room says all"
    monkeypatch.setattr(Admission, "is_hopeless", lambda self, promise, outlays, now: len(outlays) <= 16)
    assert reception.foresee(world.now, None, 400, world.now) is None, "those asked have no hope, another one has"
    one, few, all_of_them = asked[1:]
    assert one == 1 < few <= 16 and all_of_them == 40
    monkeypatch.setattr(Admission, "is_hopeless", lambda self, promise, outlays, now: True)
    assert reception.foresee(world.now, None, 400, world.now) is not None
    asked.clear()
    last = fleet.all()[-1].view
    last.report(msgspec.structs.replace(last.load, running=0, waiting=0), (*last.pending,), world.now)
    last.accepted.clear()
    reception.foresight.forget()
    assert reception.foresee(world.now, None, 400, world.now) is None and not asked, "an empty one takes anything: nobody is asked"


def full_world() -> World:
    """Every seat is taken for long, and the replica's model is believed: a seat's time is what one more request costs."""
    world = World(CONFIG, [ModelledReplica("r0", truth=CPU, limits=limits(max_num_seqs=16))])
    prove(world)
    for i in range(21):
        one = request(f"b{i}", prompt_of(i, 40), max_tokens=400)
        world.replicas["r0"].submit(msgspec.structs.replace(one, attempt=1_000_000 + i), world.now)
    world.run(world.now + 2.0)
    return world


def told_s(world: World, about_tokens: int, count: int = 1) -> float:
    """What the last of so many is told."""
    seconds = 0.0
    for _ in range(count):
        refusal = world.board.reception.foresee(world.now, None, about_tokens, world.now)
        assert refusal is not None and refusal.retry_after_s is not None
        seconds = refusal.retry_after_s
    return seconds


def test_at_full_seats_a_refused_text_counts_as_one_seat_whatever_its_length() -> None:
    """A seat frees about once a second; 700 tokens are prefilled in less."""
    (known,) = full_world().board.fleet.routable()
    assert known.view.outlook is not None
    seat_s = 1.0 / known.view.outlook.finishes_per_s
    assert 700 * CPU.b < seat_s < 2.0, "the premise"
    first_s = told_s(full_world(), 700)
    assert first_s + 4 * seat_s / 2 < told_s(full_world(), 700, 5) <= 1.25 * (first_s + 4 * seat_s)


def test_one_enormous_body_counts_as_much_as_fits() -> None:
    world = full_world()
    first_s = told_s(world, 8_000_000 // 5)
    (known,) = world.board.fleet.routable()
    ahead = known.view.outlook
    assert ahead is not None
    prefill_s = known.view.limits.max_model_len * (ahead.base_s / ahead.chunk + ahead.slope_s)
    assert prefill_s < 12.0, "the premise: less than the most that anybody is told"
    assert told_s(world, 100) <= 1.25 * (first_s + prefill_s)


def test_a_flood_of_refusals_is_forgotten_when_they_could_have_come() -> None:
    world = full_world()
    assert told_s(world, 100_000, 500) <= RETRY_AFTER_MAX_S * 1.25
    returning_s = world.board.reception._admission._returning_s
    assert returning_s <= world.now + RETRY_AFTER_MAX_S


def asked(world: World, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Grows whenever replicas are asked what they could do."""
    found: list[float] = []
    outlays = world.board.fleet.outlays

    def counted(*arguments: Any, **options: Any) -> Any:
        found.append(world.now)
        return outlays(*arguments, **options)

    monkeypatch.setattr(world.board.fleet, "outlays", counted)
    return found


def test_a_burst_is_judged_once_and_again_when_something_has_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    world = busy_world()
    judged = asked(world, monkeypatch)

    def foresee(arrival_s: float, now: float, **terms: Any) -> bool:
        before = len(judged)
        assert world.board.reception.foresee(arrival_s, Terms(**terms), 400, now) is not None
        return len(judged) > before

    start = world.now
    assert foresee(start, start)
    assert not any(foresee(start + i * 1e-4, start + i * 1e-4) for i in range(40))
    assert not foresee(start - 1.0, start), "whoever came earlier has less hope"
    assert foresee(start, start, tenant="another"), "other terms are another question"
    assert foresee(start + 0.02, start + 0.02), "it holds for a moment only"
    assert not foresee(start + 0.02, start + 0.02)
    world.board.tick(start + 0.02)
    assert foresee(start + 0.02, start + 0.02), "something may have changed"


def test_what_a_frame_brings_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica is through with its work: nobody is refused for what was foreseen before."""

    def verdicts() -> tuple[bool, bool]:
        world = busy_world()
        before = world.board.reception.foresee(world.now, Terms(), 400, world.now)
        known = world.board.fleet.all()[0]
        idle = msgspec.structs.replace(
            known.view.load, running=0, waiting=0, queued_prefill_tokens=0, context_tokens=0, progress=known.view.load.progress + 1
        )
        world.board.frame(known.view.incarnation, Frame(known.view.incarnation.epoch, 0, idle), world.now)
        return before is None, world.board.reception.foresee(world.now, Terms(), 400, world.now) is None

    assert verdicts() == (False, True)
    monkeypatch.setattr(Foresight, "forget", lambda self: None)
    assert verdicts() == (False, False), "the control: what was kept would have refused it"


def test_short_prompts_are_not_refused_for_what_long_ones_wait() -> None:
    world = busy_world()
    view = world.board.fleet.routable()[0].view
    half = view.limits.max_num_batched_tokens // 2

    def refused(about_tokens: int) -> bool:
        return world.board.reception.foresee(world.now, None, about_tokens, world.now) is not None

    assert refused(half), "where the order is kept"
    view.report(msgspec.structs.replace(view.load, short_prefill_tokens=0), (), world.now)
    world.board.reception.foresight.forget()
    assert [refused(half), refused(half + 1), refused(half)] == [False, True, False], "what was found of one is not said of the other"
    world.board.fleet.hits.see(-300.0, world.now)
    assert not refused(half + 300), "others have found that much of theirs in a cache"
    assert refused(half + 301)
    assert refused(half + 300) is False
    assert world.board.fleet.hits.least(world.now + 601.0) == math.inf, "lately"
