"""Who is served when many want more than there is: tenants and classes on modelled replicas under a virtual clock."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import msgspec
import pytest

from replica.contract.messages import StepTimeCoefficients
from router.config import ClassConfig, RouterConfig, TenantConfig
from router.policy.standing import Depth, Standing
from tests.router.modelled_replica import CPU, GPU, ModelledReplica, limits
from tests.router.virtual_world import Outcome, World, prompt_of, request

SLO_S = 2.0
CONFIG = RouterConfig(queue_time_slo_s=SLO_S, queue_depth_max=256, queue_tokens_max=200_000)
SMALL = limits(max_num_seqs=16)


def calm_world(config: RouterConfig, *, truth: StepTimeCoefficients = CPU, count: int = 1, small: bool = True) -> World:
    """Replicas that have served a little: their models are believed."""
    world = World(config, [ModelledReplica(f"r{i}", truth=truth, limits=SMALL if small else limits()) for i in range(count)])
    for i in range(16 * count):
        world.arrive(request(f"calm{i}", prompt_of(90_000 + i, 100), max_tokens=4))
        world.run(world.now + 1.0)
    return world


def ask(world: World, name: str, *, tokens: int = 200, most: int = 30, tenant: str = "", kind: str = "standard") -> Outcome:
    one = request(name, prompt_of(hash_of(name), tokens), max_tokens=most)
    return world.arrive(msgspec.structs.replace(one, tenant=tenant, request_class=kind))


def hash_of(name: str) -> int:
    return sum(ord(letter) * 31**place for place, letter in enumerate(name)) % 1_000_003


def queue_times(world: World, start: str) -> list[float]:
    times = (value for one in world.replicas.values() for (name, _), value in one.queue_times.items() if name.startswith(start))
    return sorted(times)


def shed_part(outcomes: Iterable[Outcome]) -> float:
    all_of_them = list(outcomes)
    return sum(one.rejected is not None for one in all_of_them) / len(all_of_them)


def flood(config: RouterConfig, *, of_b: bool = True, of_a: bool = True) -> tuple[World, list[Outcome], list[Outcome]]:
    """Tenant A keeps 500 requests under way or refused, tenant B sends one every second."""
    world = calm_world(config)
    begin = world.now
    a: list[Outcome] = []
    b: list[Outcome] = []
    random = Random(2)

    def more_of_a(i: int) -> None:
        a.append(ask(world, f"a{i}", tenant="a"))

    time_s = begin
    for i in range(900 if of_a else 0):
        time_s += random.expovariate(30.0)
        world.at(time_s, lambda i=i: more_of_a(i))
    for i in range(25 if of_b else 0):
        world.at(begin + 4 + i, lambda i=i: b.append(ask(world, f"b{i}", tenant="b")))
    world.run(begin + 30.0)
    return world, a, b


def test_one_that_floods_does_not_starve_another() -> None:
    """ADM-09: B waits for about one slot, and is not shed; A is."""
    solo, _, _ = flood(CONFIG, of_a=False)
    slots, _, _ = flood(CONFIG, of_b=False)
    world, a, b = flood(CONFIG)
    alone_s = queue_times(solo, "b")[-1]
    finished = sum(bool(one.finishes()) for one in slots.outcomes.values())
    slot_s = 30.0 / finished  # the mean time until one frees
    times = queue_times(world, "b")
    assert shed_part(b) == 0.0
    assert shed_part(a) > 0.3
    assert times[int(0.95 * len(times))] <= 2 * alone_s + 4 * slot_s, "p95 of 25: a few slots' time"
    world.run(world.now + 60)
    assert (world.own(), len(world.board.reception.queue), len(world.board.traffic.dispatches)) == (0, 0, 0)


def test_without_standing_it_would_wait_behind_the_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Standing, "depth", lambda self, *rest: Depth())
    world, _, b = flood(CONFIG)
    times = queue_times(world, "b")
    assert shed_part(b) > 0 or times[int(0.95 * len(times))] > 0.5


def test_a_flood_alone_has_everything() -> None:
    """What is kept free for others is kept only while there are others."""
    world, a, _ = flood(CONFIG, of_b=False)
    _, a2, _ = flood(CONFIG)
    served, served_beside_b = (sum(bool(one.finishes()) for one in some) for some in (a, a2))
    assert served >= served_beside_b
    assert max(queue_times(world, "a")) > 1.0, "it may fill the queues of the replicas"


def test_weights_divide_what_there_is() -> None:
    keys = {"a": 1.0, "b": 3.0}
    tenants = {name: TenantConfig(api_keys=(name,), weight=weight) for name, weight in keys.items()}
    world = calm_world(CONFIG.model_copy(update={"tenants": tenants}))
    begin = world.now
    random = Random(3)
    for name in keys:
        time_s = begin
        for i in range(900):
            time_s += random.expovariate(30.0)
            world.at(time_s, lambda i=i, name=name: ask(world, f"{name}{i}", tenant=name) and None)
    world.run(begin + 30.0)
    settled = [one for one in world.outcomes.values() if one.batch.arrival_s > begin + 8 and one.finishes()]
    counts = {name: sum(one.batch.request_id.startswith(name) for one in settled) for name in keys}
    assert 2.0 <= counts["b"] / counts["a"] <= 4.0, counts


def test_a_full_queue_makes_room_for_who_has_less_than_its_share() -> None:
    config = CONFIG.model_copy(update={"queue_depth_max": 8, "queue_time_slo_s": 8.0})
    world = calm_world(config)
    queue = world.board.reception.queue
    ask(world, "b-before", tenant="b", most=2)
    i = 0
    while queue.depth < 8:
        ask(world, f"a{i}", tenant="a", tokens=300)
        i += 1
        assert i < 500
    late = ask(world, "b-now", tenant="b", tokens=300)
    assert late.rejected is None
    assert queue.depth <= 8
    displaced = [one for one in world.outcomes.values() if one.rejected is not None and "less than their share" in one.rejected.message]
    assert len(displaced) == (late.batch_id in queue)
    assert all(one.rejected is not None and one.rejected.retry_after_s for one in displaced)
    world.run(world.now + 60)
    assert late.finishes()


def test_limits_of_a_tenant_in_flight() -> None:
    tenants = {"a": TenantConfig(api_keys=("k",), requests_max=4, tokens_max=1000)}
    world = calm_world(CONFIG.model_copy(update={"tenants": tenants}), truth=GPU, small=False)
    outcomes = [ask(world, f"a{i}", tenant="a", tokens=150) for i in range(6)]
    reasons = [one.rejected.reason for one in outcomes if one.rejected]
    assert reasons == ["tenant_limit"] * 2
    assert all(one.rejected.status == 429 and one.rejected.retry_after_s for one in outcomes if one.rejected)
    assert ask(world, "b", tenant="b").rejected is None, "another tenant's are not counted"
    world.run(world.now + 10)
    assert len(world.board.reception.tenants) == 0
    long = [ask(world, f"long{i}", tenant="a", tokens=700) for i in range(2)]
    assert [one.rejected is None for one in long] == [True, False], "tokens are limited as well"
    for one in long[:1]:
        world.carry_out(world.board.close(one.batch_id, world.now))
    assert len(world.board.reception.tenants) == 0
    world.board.reception.tenants.routers = 2
    half = [ask(world, f"half{i}", tenant="a", tokens=100) for i in range(4)]
    assert [one.rejected is None for one in half] == [True, True, False, False], "each of two routers has its part"


def test_the_number_of_live_routers_comes_from_the_replicas() -> None:
    world = calm_world(CONFIG)
    (known,) = world.board.fleet.all()
    frame = msgspec.structs.replace(world.replicas["r0"].frame(), routers=3)
    world.carry_out(world.board.frame(known.view.incarnation, frame, world.now))
    world.carry_out(world.board.tick(world.now))
    assert world.board.reception.tenants.routers == 3


# --- classes ---------------------------------------------------------------------------------------------------------

CLASSES = {
    "interactive": ClassConfig(queue_time_slo_s=1.0),
    "batch": ClassConfig(queue_time_slo_s=120.0, floor=0.1),
}


def mixed(config: RouterConfig, interactive_rate: float, seconds: float = 30.0) -> tuple[World, dict[str, list[Outcome]]]:
    """A heap of batch work, and interactive requests beside it."""
    world = calm_world(config)
    begin = world.now
    outcomes: dict[str, list[Outcome]] = {"interactive": [], "batch": []}
    random = Random(4)
    world.at(begin, lambda: outcomes["batch"].extend(ask(world, f"batch{i}", kind="batch", tokens=300) for i in range(200)))
    time_s = begin
    i = 0
    while time_s < begin + seconds:
        time_s += random.expovariate(interactive_rate)
        i += 1
        world.at(time_s, lambda i=i: outcomes["interactive"].append(ask(world, f"interactive{i}", kind="interactive", most=10)))
    world.run(begin + seconds)
    return world, outcomes


def test_work_that_has_time_keeps_out_of_the_way() -> None:
    world, outcomes = mixed(CONFIG.model_copy(update={"classes": CLASSES}), interactive_rate=1.0)
    assert shed_part(outcomes["interactive"]) <= 0.15
    times = queue_times(world, "interactive")
    assert times[int(0.95 * len(times))] <= 1.0
    done = sum(bool(one.finishes()) for one in outcomes["batch"])
    assert done >= 30, "what the others leave is used"


def test_without_standing_batch_work_would_fill_the_replicas_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Standing, "depth", lambda self, *rest: Depth())
    _, outcomes = mixed(CONFIG.model_copy(update={"classes": CLASSES}), interactive_rate=1.0)
    assert shed_part(outcomes["interactive"]) > 0.3


@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_a_floor_is_kept_under_a_flood_of_the_other_class(floor: float) -> None:
    classes = {**CLASSES, "batch": ClassConfig(queue_time_slo_s=120.0, floor=floor)}
    _, outcomes = mixed(CONFIG.model_copy(update={"classes": classes}), interactive_rate=30.0)
    done = sum(len(one.batch.requests[0].prompt_ids) for one in outcomes["batch"] if one.deltas)
    other = sum(len(one.batch.requests[0].prompt_ids) for one in outcomes["interactive"] if one.deltas)
    part = done / (done + other)
    if floor:
        assert part >= 0.6 * floor, part
    else:
        assert part <= 0.15, "the control: without a floor it waits for its deadline"


def test_a_class_that_is_not_there_is_refused_with_its_names() -> None:
    world = calm_world(CONFIG)
    one = ask(world, "q", kind="gold")
    assert one.rejected is not None
    assert (one.rejected.status, one.rejected.reason) == (400, "unknown_class")
    assert "standard" in one.rejected.message and "gold" not in one.rejected.message


# --- what else a class promises --------------------------------------------------------------------------------------


def first_tokens(world: World, outcomes: list[Outcome]) -> list[tuple[Outcome, float]]:
    """When each had its first token, from its arrival."""
    return [(one, world.first_s[one.batch_id] - one.batch.arrival_s) for one in outcomes if one.batch_id in world.first_s]


def lengths(config: RouterConfig, seed: int = 5) -> tuple[World, list[Outcome]]:
    """Twice what a replica can do, of prompts of 50 to 3,000 tokens."""
    world = calm_world(config, small=False)
    begin = world.now
    outcomes: list[Outcome] = []
    random = Random(seed)
    time_s = begin
    for i in range(400):
        time_s += random.expovariate(3.0)
        tokens = int(50 * 60 ** random.random())
        world.at(time_s, lambda i=i, tokens=tokens: outcomes.append(ask(world, f"q{i}", tokens=tokens, most=10)))
    world.run(time_s + 60)
    return world, outcomes


def test_the_time_to_first_token_is_promised_with_the_length() -> None:
    slo = ClassConfig(queue_time_slo_s=60.0, ttft_slo_s=1.0, ttft_slo_per_token_s=3 / 1_200)
    world, outcomes = lengths(CONFIG.model_copy(update={"classes": {"standard": slo}}))
    served = first_tokens(world, outcomes)
    kept = sum(ttft_s <= 1.0 + 3 / 1_200 * len(one.batch.requests[0].prompt_ids) for one, ttft_s in served)
    assert kept / len(served) >= 0.95
    assert sum(len(one.batch.requests[0].prompt_ids) for one, _ in served) >= 0.8 * 1_200 * 133, "and the replica was kept busy"
    reasons = {one.rejected.reason for one in outcomes if one.rejected}
    assert reasons and reasons <= {"ttft", "ttft_waited"}


def test_without_that_promise_it_would_be_broken() -> None:
    world, outcomes = lengths(CONFIG.model_copy(update={"classes": {"standard": ClassConfig(queue_time_slo_s=60.0)}}))
    served = first_tokens(world, outcomes)
    kept = sum(ttft_s <= 1.0 + 3 / 1_200 * len(one.batch.requests[0].prompt_ids) for one, ttft_s in served)
    assert kept / len(served) < 0.6


@pytest.mark.parametrize(("tpot_s", "most"), [(0.02, 6), (None, 16)])
def test_the_time_per_token_bounds_the_batch(tpot_s: float | None, most: int) -> None:
    """A step takes 8 ms and 2 ms per decode."""
    config = CONFIG.model_copy(update={"classes": {"standard": ClassConfig(queue_time_slo_s=30.0, tpot_slo_s=tpot_s)}})
    world = calm_world(config)
    for i in range(30):
        ask(world, f"q{i}", tokens=20, most=60)
    peak = 0
    for _ in range(100):
        world.run(world.now + 0.05)
        peak = max(peak, len(world.replicas["r0"].running))
    assert peak == most if tpot_s is None else 3 <= peak <= most
    world.run(world.now + 60)
    assert all(one.finishes() for one in world.outcomes.values() if one.rejected is None), "nobody waits for ever"


def test_predictions_cover_what_they_say() -> None:
    """Coverage of queue time and time to first token near the promised quantiles, with a model that is wrong by two."""
    told = StepTimeCoefficients(CPU.a / 2, CPU.b / 2, CPU.c / 2, CPU.d / 2)
    world = World(CONFIG, [ModelledReplica("r0", truth=CPU, told=told)])
    random = Random(6)
    time_s = 1.0
    for i in range(900):
        time_s += random.expovariate(4.0)
        world.at(time_s, lambda i=i: ask(world, f"q{i}", tokens=20 + (i * 37) % 400, most=20) and None)
    world.run(time_s + 30)
    for what in ("queue_time", "ttft"):
        sums = {quantile: [0, 0] for quantile in (0.5, 0.98)}
        for (of, _, quantile), count in world.board.fleet.coverage.counts.items():
            if of == what and quantile in sums:
                sums[quantile][0] += count.within
                sums[quantile][1] += count.total
        assert sums[0.98][1] > 400
        assert sums[0.98][0] / sums[0.98][1] >= 0.95, (what, sums)
        assert 0.35 <= sums[0.5][0] / sums[0.5][1] <= 0.85, (what, sums)


# --- promises of a request's own -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", ["ab", "aa"], ids=["two tenants", "one tenant"])
def test_a_longer_promise_does_not_fill_the_replica_before_others(keys: str) -> None:
    world = calm_world(CONFIG, small=False)
    for i in range(256):
        world.arrive(msgspec.structs.replace(request(f"long{i}", prompt_of(i, 200)), tenant=keys[0]), slo_s=600.0)
    world.run(world.now + 0.1)
    assert len(world.board.reception.queue) > 200, "they wait here"
    next_ones = [ask(world, f"next{i}", tenant=keys[1], most=5) for i in range(3)]
    assert not any(one.rejected for one in next_ones)
    world.run(world.now + 4.0)
    assert all(one.finishes() for one in next_ones)
    assert max(queue_times(world, "next")) <= SLO_S
    world.run(world.now + 120)
    assert all(one.finishes() for one in world.outcomes.values()), "what they were promised is kept as well"


def test_by_the_class_alone_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Standing, "depth", lambda self, *rest: Depth())
    world = calm_world(CONFIG, small=False)
    for i in range(256):
        world.arrive(msgspec.structs.replace(request(f"long{i}", prompt_of(i, 200)), tenant="a"), slo_s=600.0)
    one = ask(world, "next", tenant="b")
    assert one.rejected is not None and one.rejected.reason == "queue_time"


def test_a_queue_full_of_longer_promises_makes_room() -> None:
    world = calm_world(CONFIG.model_copy(update={"queue_depth_max": 16}), small=False)
    for i in range(64):
        world.arrive(request(f"long{i}", prompt_of(i, 200)), slo_s=600.0)
    assert world.board.reception.queue.depth == 16
    late = ask(world, "next", most=5)
    world.run(world.now + 3)
    assert late.finishes(), "of the same tenant and class, and with less time"
