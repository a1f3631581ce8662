"""The only replica dies or freezes, or there is none yet: ready and live say so, and whoever asks is answered."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from replica.contract.messages import FinishReason
from router import traffic
from router.config import RouterConfig
from router.policy.fleet import Fleet
from router.policy.health import Health
from router.ports import PoolStatus
from router.reception import Reception
from router.refusal import Refusal
from router.status import pool_status
from router.switchboard import Switchboard
from tests.router.modelled_replica import ModelledReplica
from tests.router.virtual_world import World, prompt_of, request

CONFIG = RouterConfig(queue_time_slo_s=30)


def world_of(count: int) -> World:
    world = World(CONFIG, [ModelledReplica(f"r{i}") for i in range(count)])
    for replica in world.replicas.values():
        replica.progress = 1000  # not cold
    world.run(1.0)
    return world


def said(world: World) -> PoolStatus:
    return pool_status(world.board, None, ("m", ""), world.now, stopping=False)


def the_only_one_freezes() -> None:
    """FLO-08: ready says no within max(2 s, 4 steps) + 1 s, live once there is work that nobody does; nobody hangs."""
    world = world_of(1)
    begun = [world.arrive(request(f"q{i}", prompt_of(i, 60), max_tokens=600)) for i in range(2)]
    world.run(1.5)
    assert said(world).ready and said(world).live
    world.freeze("r0")
    world.run(1.5 + 3.0)
    assert not said(world).ready
    fresh = world.arrive(request("fresh", prompt_of(77, 60)))
    assert fresh.rejected is not None and fresh.rejected.status == 503 and fresh.rejected.retry_after_s
    world.run(1.5 + 3.0 + 2.0)
    assert not said(world).live
    world.run(60.0)
    assert [outcome.finishes() for outcome in begun] == [[FinishReason.ERROR]] * 2


def one_of_two_freezes() -> None:
    world = world_of(2)
    outcomes = [world.arrive(request(f"q{i}", prompt_of(i, 60), max_tokens=300)) for i in range(8)]
    world.run(1.5)
    world.freeze("r0")
    for quarter in range(40):
        world.run(1.5 + quarter / 4)
        assert said(world).ready and said(world).live
    world.run(60.0)
    assert all(outcome.finishes() == [FinishReason.LENGTH] and outcome.tokens() == outcome.expected() for outcome in outcomes)


def the_other_one_stands_still_meanwhile() -> None:
    """One dies while the machine is too busy for the other: who has begun waits for it, and loses nothing."""
    world = world_of(2)
    outcomes = [world.arrive(request(f"q{i}", prompt_of(i, 60), max_tokens=300)) for i in range(8)]
    world.run(1.5)
    survivor = world.replicas["r1"]
    world.kill("r0")
    world.freeze("r1")
    world.at(8.0, lambda: world.thaw(survivor))
    world.run(90.0)
    assert all(outcome.finishes() == [FinishReason.LENGTH] and outcome.tokens() == outcome.expected() for outcome in outcomes)


def there_is_none_yet() -> None:
    """FLO-14: a router without a replica is not ready, and says 503 and when to come back."""
    world = World(CONFIG, [])
    asked = world.arrive(request("q", prompt_of(1, 5)))
    world.run(30.0)
    assert not said(world).ready and said(world).live
    assert asked.ended and asked.rejected is not None
    assert asked.rejected.status == 503 and asked.rejected.retry_after_s
    world.connect(ModelledReplica("r0"))
    assert said(world).ready


Story = Callable[[], None]


@pytest.mark.parametrize(
    "story",
    [the_only_one_freezes, one_of_two_freezes, the_other_one_stands_still_meanwhile, there_is_none_yet],
    ids=lambda story: story.__name__,
)
def test_ready_live_and_answered(story: Story) -> None:
    story()


@pytest.mark.parametrize(
    ("owner", "name", "off", "story"),
    [
        (Health, "check", lambda self, now: False, the_only_one_freezes),
        (Fleet, "routable", Fleet.all, the_only_one_freezes),
        (Switchboard, "_unserved", lambda self, now: None, the_only_one_freezes),
        (Health, "check", lambda self, now: False, one_of_two_freezes),
        (traffic, "BEGUN_MAX_S", 2.0, the_other_one_stands_still_meanwhile),
        (Reception, "no_replica", lambda self: Refusal(503, "no_replica", "", None), there_is_none_yet),
    ],
    ids=["no-watch", "stalled-ones-count", "no-clock-of-unserved-work", "no-watch-of-two", "no-patience", "no-retry-after"],
)
def test_without_the_guard_it_would_fail(owner: object, name: str, off: object, story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, off)
    with pytest.raises(AssertionError):
        story()
