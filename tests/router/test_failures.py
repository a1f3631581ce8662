"""Deaths, freezes and drains under streams, with the production switchboard and a virtual clock."""

import pytest

from replica.contract.messages import FinishReason
from router.config import RouterConfig
from router.policy.health import Health
from router.switchboard import Switchboard
from tests.router.modelled_replica import CPU, ModelledReplica, limits
from tests.router.virtual_world import Outcome, World, prompt_of, request

CONFIG = RouterConfig(queue_time_slo_s=30, drain_timeout_s=3.0)


def world_of(count: int, config: RouterConfig = CONFIG) -> World:
    world = World(config, [ModelledReplica(f"r{i}") for i in range(count)])
    for replica in world.replicas.values():
        replica.progress = 1000  # not cold
    world.run(1.0)
    return world


def streams(world: World, count: int = 24, most: int = 200) -> list[Outcome]:
    return [world.arrive(request(f"q{i}", prompt_of(i, 60), max_tokens=most, seed=i)) for i in range(count)]


def whole(outcome: Outcome) -> bool:
    return outcome.tokens() == outcome.expected() and outcome.finishes() == [FinishReason.LENGTH]


def test_a_killed_replica_loses_no_stream_and_changes_no_token() -> None:
    """FLO-03."""
    world = world_of(2)
    outcomes = streams(world)
    world.run(1.5)
    assert all(10 < len(outcome.tokens()) < 190 for outcome in outcomes)
    world.kill("r0")
    world.run(30.0)
    assert all(whole(outcome) for outcome in outcomes)
    assert world.board.traffic.tally.moves == 12
    assert world.own() == 0


def test_a_frozen_replica_is_seen_by_its_progress_and_returns_after_a_probe() -> None:
    """RTR-14, FLO-06."""
    world = world_of(2)
    outcomes = streams(world, most=600)
    world.run(1.5)
    frozen = world.replicas["r0"]
    world.freeze("r0")
    world.run(1.5 + 1.9)
    assert not world.notices, "not yet"
    world.run(1.5 + 3.0)
    assert [(notice.event, notice.replica_id, notice.streams) for notice in world.notices] == [("replica stalled", "r0", 12)]
    before = len(world.submits)
    for i in range(20):
        world.arrive(request(f"n{i}", prompt_of(100 + i, 20)))
    assert {name for name, _ in world.submits[before:]} == {"r1"}
    world.run(12.0)
    world.thaw(frozen)
    world.run(13.5)
    assert world.notices[-1].event == "replica makes progress again"
    before = len(world.submits)
    for i in range(20):
        world.arrive(request(f"m{i}", prompt_of(200 + i, 20)))
    assert {name for name, _ in world.submits[before:]} == {"r0", "r1"}
    world.run(60.0)
    assert all(whole(outcome) for outcome in outcomes)
    assert frozen.prefills + world.replicas["r1"].prefills <= len(world.outcomes) + world.board.traffic.tally.moves


def test_without_the_watch_a_freeze_would_hang_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Health, "check", lambda self, now: False)
    world = world_of(2)
    outcomes = streams(world)
    world.run(1.5)
    world.freeze("r0")
    world.run(60.0)
    assert sum(outcome.ended for outcome in outcomes) == 12


def test_an_idle_replica_is_never_taken_for_stalled() -> None:
    world = world_of(2)
    world.run(600.0)
    assert not world.notices
    assert len(world.board.fleet.routable()) == 2


def test_a_pause_of_the_router_itself_proves_nothing() -> None:
    world = world_of(2)
    world.now += 20.0  # suspended: no tick, no frame was taken
    world.carry_out(world.board.tick(world.now))
    assert not world.notices
    board = Switchboard(CONFIG, seed=1, now=0.0)  # the control: the same silence, while the router watched
    board.connected(ModelledReplica("r0").welcome(), 0.0)
    effects = [effect for quarter in range(80) for effect in board.tick(quarter / 4)]
    assert len(effects) == 1


def test_slowness_alone_starts_no_second_attempt() -> None:
    """ADM-07."""
    slow = type(CPU)(a=1.5, b=CPU.b, c=CPU.c, d=CPU.d)
    world = World(CONFIG, [ModelledReplica(f"r{i}", truth=slow, limits=limits(step_slo_s=None)) for i in range(2)])
    for replica in world.replicas.values():
        replica.progress = 1000
    world.run(1.0)
    outcomes = [world.arrive(request(f"q{i}", prompt_of(i, 600), max_tokens=3), slo_s=500.0) for i in range(20)]
    world.run(300.0)
    assert all(whole(outcome) for outcome in outcomes)
    assert len(world.submits) == 20
    assert not world.notices


def test_the_only_replica_dies() -> None:
    """FLO-08: no hang; 503 before the first token, an error after it; ready and live tell the difference."""
    world = world_of(1)
    begun = streams(world, 2)
    world.run(1.2)
    fresh = world.arrive(request("fresh", prompt_of(77, 60)))
    assert all(outcome.tokens() for outcome in begun)
    world.kill("r0")
    assert not world.board.fleet.routable()
    world.run(5.0)
    assert fresh.rejected is not None
    world.run(12.0)  # who has begun waits longer
    assert [outcome.finishes() for outcome in begun] == [[FinishReason.ERROR]] * 2
    assert fresh.rejected.status == 503
    assert fresh.rejected.retry_after_s
    assert not world.board.is_live(world.now)
    late = world.arrive(request("late", prompt_of(78, 60)))
    assert late.rejected is not None
    assert late.rejected.status == 503
    reborn = ModelledReplica("r0", epoch=2)
    world.connect(reborn)
    assert world.board.is_live(world.now)
    again = world.arrive(request("again", prompt_of(78, 60)))
    world.run(20.0)
    assert whole(again)


def test_a_fleet_that_is_still_loading_is_live() -> None:
    world = World(CONFIG, [])
    world.arrive(request("q", prompt_of(1, 5)))
    world.run(30.0)
    assert world.board.is_live(world.now)


def test_streams_wait_a_moment_for_a_replica_to_come_back() -> None:
    world = world_of(1)
    outcomes = streams(world, 4)
    world.run(1.5)
    world.kill("r0")
    world.run(2.5)
    world.connect(ModelledReplica("r0", epoch=2))
    world.run(30.0)
    assert all(whole(outcome) for outcome in outcomes)


def test_a_drain_lets_run_and_moves_what_is_left() -> None:
    world = world_of(2)
    short = streams(world, 4, most=100)
    long = [world.arrive(request(f"l{i}", prompt_of(50 + i, 60), max_tokens=3000)) for i in range(4)]
    world.run(1.2)
    world.board.leave("r0", True, world.now)
    before = len(world.submits)
    for i in range(6):
        world.arrive(request(f"n{i}", prompt_of(100 + i, 20)))
    assert {name for name, _ in world.submits[before:]} == {"r1"}
    world.run(4.0)
    assert world.board.traffic.tally.moves == 0
    assert all(whole(outcome) for outcome in short)
    world.run(5.0)
    assert world.board.traffic.tally.moves == 2
    world.run(200.0)
    assert all(whole(outcome) for outcome in long)


def test_a_drain_of_the_last_replica_moves_nobody() -> None:
    world = world_of(1)
    outcomes = streams(world, 2, most=2000)
    world.replicas["r0"].draining = True
    world.run(200.0)
    assert all(whole(outcome) for outcome in outcomes)


def test_a_member_that_comes_back_before_its_link_closed_serves_again() -> None:
    world = world_of(1)
    world.board.leave("r0", True, world.now)
    assert not world.board.fleet.routable()
    world.board.leave("r0", False, world.now)
    assert len(world.board.fleet.routable()) == 1


def test_another_fingerprint_is_another_pool() -> None:
    world = world_of(1)
    stranger = ModelledReplica("s", fingerprint="other")
    incarnation, _ = world.board.connected(stranger.welcome(), world.now)
    assert incarnation is None
    world.kill("r0")
    incarnation, _ = world.board.connected(stranger.welcome(), world.now)
    assert incarnation is not None, "nobody of the old pool is left"


def test_a_new_pool_serves_while_the_old_one_drains() -> None:
    """A rolling update to other weights: once all of the old pool are leaving, the first of the new one takes over."""
    world = world_of(2)
    old = streams(world, 4, most=600)
    world.run(1.2)
    world.board.leave("r0", True, world.now)
    assert world.board.connected(ModelledReplica("s", fingerprint="other").welcome(), world.now)[0] is None, "r1 stays"
    world.board.leave("r1", True, world.now)
    world.connect(ModelledReplica("s", fingerprint="other"))
    new = world.arrive(request("new", prompt_of(77, 20)))
    assert world.submits[-1][0] == "s"
    world.board.leave("r1", False, world.now)
    assert [known.view.incarnation.replica_id for known in world.board.fleet.routable()] == ["s"], "one pool at a time"
    world.run(60.0)
    assert all(whole(outcome) for outcome in [*old, new])


def test_a_stream_that_moves_waits_while_the_others_queues_are_full() -> None:
    """Its tokens are with the client: a full queue is no reason to give it up at once."""
    world = World(CONFIG, [ModelledReplica("r0"), ModelledReplica("r1", limits=limits(max_waiting=1, max_num_seqs=1))])
    for replica in world.replicas.values():
        replica.progress = 1000
    world.board.fleet.lose("r1")
    outcome = world.arrive(request("moved", prompt_of(1, 60), max_tokens=400))
    world.run(1.0)
    assert outcome.tokens()
    world.connect(world.replicas["r1"])
    full = world.replicas["r1"]
    for i in range(2):  # somebody else's, for a second
        full.submit(request(f"other{i}", prompt_of(50 + i, 60), max_tokens=40), world.now)
        world._begin(full)
    world.kill("r0")
    world.run(20.0)
    assert whole(outcome)


def test_a_stream_never_crosses_to_another_pool() -> None:
    world = world_of(1)
    outcomes = streams(world, 2)
    world.run(1.5)
    world.kill("r0")
    world.connect(ModelledReplica("r0", epoch=2, fingerprint="other"))
    world.run(20.0)
    assert [outcome.finishes() for outcome in outcomes] == [[FinishReason.ERROR]] * 2


def test_poison_does_not_go_through_the_fleet() -> None:
    """A request that kills whatever runs it takes two replicas, not four."""
    world = world_of(4)
    world.arrive(request("poison", prompt_of(1, 60), max_tokens=1000))
    killed = 0
    while world.submits and world.board.traffic.attempts:
        world.run(world.now + 0.2)
        (stream,) = [stream for _, stream in world.board.traffic.attempts.values()]
        assert stream.incarnation is not None
        world.kill(stream.incarnation.replica_id)
        killed += 1
    assert killed == 2
    (outcome,) = world.outcomes.values()
    assert outcome.finishes() == [FinishReason.ERROR]
    assert len(world.replicas) == 2
