"""One that waits for reasons of its own keeps nobody else waiting; one that nobody could ever serve does not wait."""

from __future__ import annotations

import math

import msgspec
import pytest

from router.config import ClassConfig, RouterConfig
from router.policy.classes import Terms
from router.policy.queue import WaitQueue
from router.ports import Batch
from router.reception import OTHERS_MAX
from tests.router.modelled_replica import CPU, ModelledReplica, limits
from tests.router.virtual_world import Outcome, World, prompt_of, request

CLASSES = {"interactive": ClassConfig(queue_time_slo_s=2.0)}
CONFIG = RouterConfig(classes=CLASSES)
HOPELESS_S = 1e-6
ALONE_S = 0.0105  # a step takes 8 ms and 2 ms per decode: kept alone, not beside another


def busy(config: RouterConfig = CONFIG, *, proven: bool = True) -> World:
    """One replica, and one stream that runs there for long."""
    world = World(config, [ModelledReplica("r0", truth=CPU, limits=limits())])
    for i in range(16 if proven else 0):
        world.arrive(request(f"calm{i}", prompt_of(90_000 + i, 100), max_tokens=4))
        world.run(world.now + 1.0)
    ask(world, "running", most=5_000)
    world.run(world.now + 0.5)
    return world


def ask(world: World, name: str, *, tokens: int = 40, most: int = 20, tenant: str = "", terms: Terms | None = None) -> Outcome:
    asked = terms or Terms()
    one = request(name, prompt_of(sum(name.encode()) * 7 + len(world.outcomes), tokens), max_tokens=most)
    one = msgspec.structs.replace(one, tenant=tenant, request_class=asked.request_class)
    batch = Batch(name, (one,), world.now, asked.queue_time_slo_s, asked.ttft_slo_s, asked.tpot_slo_s)
    batch_id, effects = world.board.arrive(batch, world.now)
    world.outcomes[batch_id] = Outcome(batch_id, batch)
    world.carry_out(effects)
    return world.outcomes[batch_id]


def waits(world: World, prefix: str) -> list[float]:
    """From the arrival at the router until the first token; without one, for ever."""
    named = [one for one in world.outcomes.values() if one.batch.request_id.startswith(prefix)]
    return [world.first_s.get(one.batch_id, math.inf) - one.batch.arrival_s for one in named]


@pytest.mark.parametrize("proven", [True, False])
def test_a_time_per_token_that_no_replica_could_keep_is_refused_at_arrival(proven: bool) -> None:
    world = busy(proven=proven)
    terms = Terms(queue_time_slo_s=9.9, tpot_slo_s=HOPELESS_S)
    foreseen = world.board.reception.foresee(world.now, terms, 40, world.now)
    assert foreseen is not None and foreseen.reason == "tpot", "before its text is read"
    one = ask(world, "never", terms=terms)
    assert one.rejected is not None
    assert (one.rejected.status, one.rejected.reason) == (429, "tpot")
    assert one.rejected.retry_after_s and 0 < one.rejected.retry_after_s <= 37.5
    assert "per token" in one.rejected.message
    assert len(world.board.reception.queue) == 0


@pytest.mark.parametrize("proven", [True, False])
@pytest.mark.parametrize("tpot_s", [HOPELESS_S, ALONE_S])
@pytest.mark.parametrize("kind", ["standard", "interactive"])
@pytest.mark.parametrize("attackers", [1, 40])
def test_one_that_waits_for_its_own_time_per_token_keeps_nobody_waiting(proven: bool, tpot_s: float, kind: str, attackers: int) -> None:
    world = busy(proven=proven)
    terms = Terms(queue_time_slo_s=9.9, tpot_slo_s=tpot_s)
    blockers = [ask(world, f"slow{i}", tenant="a", terms=terms) for i in range(attackers)]
    others = [ask(world, f"other{i}", tenant=f"b{i}", terms=Terms(kind, queue_time_slo_s=10.0)) for i in range(5)]
    same = [ask(world, f"same{i}", tenant="a") for i in range(5)]
    world.run(world.now + 3.0)
    assert all(one.finishes() for one in others + same)
    assert max(waits(world, "other") + waits(world, "same")) < 1.5
    assert not any(one.finishes() for one in blockers)
    world.run(world.now + 10.0)
    assert all(one.rejected is not None for one in blockers), "it waited for its promise, and no longer"


def test_without_offering_to_others_they_would_wait_until_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitQueue, "others", lambda self, *rest: iter(()))
    world = busy()
    ask(world, "slow", tenant="a", terms=Terms(queue_time_slo_s=9.9, tpot_slo_s=ALONE_S))
    for i in range(5):
        ask(world, f"other{i}", tenant="a")
    world.run(world.now + 15.0)
    assert min(waits(world, "other")) > 5.0


def test_a_class_that_promises_more_than_its_replicas_can_do_is_refused_and_stops_no_other() -> None:
    hasty = ClassConfig(queue_time_slo_s=10.0, tpot_slo_s=0.001)
    world = busy(CONFIG.model_copy(update={"classes": {**CLASSES, "hasty": hasty}}))
    refused = [ask(world, f"hasty{i}", terms=Terms("hasty")) for i in range(5)]
    others = [ask(world, f"other{i}") for i in range(5)]
    world.run(world.now + 2.0)
    assert {one.rejected.reason for one in refused if one.rejected} == {"tpot"} and all(one.rejected for one in refused)
    assert all(one.finishes() for one in others)


def test_one_that_turns_out_to_be_hopeless_leaves_within_a_sweep() -> None:
    """Behind others, where nobody looks at it for being late."""
    world = busy(proven=False)
    blocked = [ask(world, f"slow{i}", terms=Terms(queue_time_slo_s=9.0 + i / 10, tpot_slo_s=0.004)) for i in range(3)]
    assert not any(one.rejected for one in blocked), "the model has proved nothing yet"
    for i in range(12):
        ask(world, f"other{i}", most=2)
        world.run(world.now + 0.3)
    world.run(world.now + 0.2)
    assert {one.rejected.reason for one in blocked if one.rejected} == {"tpot_waited"} and all(one.rejected for one in blocked)


def test_more_than_are_looked_at_in_one_go_hide_nobody_behind_them() -> None:
    """Too long for the time to the first token that they ask, unless the model is several times too slow, which is not known yet."""
    world = busy(proven=False)
    terms = Terms(queue_time_slo_s=9.9, ttft_slo_s=5.0)
    blocked = [ask(world, f"long{i}", tokens=7_000, tenant=f"a{i}", terms=terms) for i in range(4 * OTHERS_MAX)]
    assert len(world.board.reception.queue) == len(blocked), "the premise: there is hope for each, and a place for none"
    other = ask(world, "other", tenant="a5", terms=Terms(queue_time_slo_s=100.0))
    assert other.batch_id in world.board.reception.queue, "the premise: behind one of its own"
    world.run(world.now + 1.0)
    assert other.batch_id not in world.board.reception.queue and other.rejected is None, "it asks for no time to the first token"
    assert len(world.board.reception.queue) == len(blocked)
