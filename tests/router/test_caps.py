"""ADM-08: what waits is counted in choices and in prompt tokens, not in requests."""

import pytest

from router.config import RouterConfig
from router.policy.request_view import RequestView
from tests.router.modelled_replica import CPU, ModelledReplica, limits
from tests.router.virtual_world import World, prompt_of, request

CONFIG = RouterConfig(queue_time_slo_s=600.0, queue_depth_max=16, queue_tokens_max=60_000)


def busy_world() -> World:
    """Every seat of the one replica is taken, by requests that generate for long."""
    world = World(CONFIG, [ModelledReplica("r0", truth=CPU, limits=limits(max_num_seqs=2, num_blocks=4096))])
    for i in range(2):
        world.arrive(request(f"b{i}", prompt_of(i, 40), max_tokens=4_000))
    world.run(1.0)
    world.arrive(*(request("short", prompt_of(9, 20), max_tokens=400, choice=choice) for choice in range(2)), slo_s=0.001)
    return world


def waiting(world: World) -> int:
    return world.board.reception.queue.depth


def test_sixteen_choices_fill_a_queue_of_sixteen() -> None:
    world = busy_world()
    world.arrive(*(request("n16", prompt_of(5, 100), choice=choice) for choice in range(16)))
    assert waiting(world) == 16
    assert world.arrive(request("one", prompt_of(6, 100))).rejected is not None
    again = busy_world()
    for i in range(16):
        again.arrive(request(f"q{i}", prompt_of(i, 100)))
    assert waiting(again) == 16, "the control: as sixteen requests of one choice"


def test_prompts_of_six_thousand_tokens_fill_it_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    world = busy_world()
    outcomes = [world.arrive(request(f"long{i}", prompt_of(100 + i, 6_000))) for i in range(16)]
    assert waiting(world) == 10, "of 16 that there were seats for"
    assert [one.rejected.reason for one in outcomes if one.rejected] == ["queue_full"] * 6
    monkeypatch.setattr(RequestView, "all_tokens", property(lambda self: 1))
    without = busy_world()
    for i in range(16):
        without.arrive(request(f"long{i}", prompt_of(100 + i, 6_000)))
    assert waiting(without) == 16, "the control: counted as requests they slip through"
