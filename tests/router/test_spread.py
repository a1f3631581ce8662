"""Where requests go: modelled replicas under a virtual clock, the production switchboard."""

from random import Random

import pytest

from replica.contract.messages import StepTimeCoefficients
from router.config import RouterConfig
from router.policy import fleet as fleet_module
from router.policy.health import Health
from router.policy.load import ReplicaView
from router.policy.popularity import Popularity
from tests.router.modelled_replica import CPU, GPU, ModelledReplica
from tests.router.virtual_world import World, prompt_of, request

CONFIG = RouterConfig(queue_time_slo_s=60)


def crowd(config: RouterConfig, truth: StepTimeCoefficients, prefixes: int) -> tuple[float, float, float]:
    """200 chats in 4 s, 400-token system prompts with Zipf weights, 4 replicas: max/mean in flight, hit rate, makespan (s)."""
    world = World(config, [ModelledReplica(f"r{i}", truth=truth) for i in range(4)])
    random = Random(5)
    loads: list[list[int]] = []
    for i in range(200):
        prefix = min(prefixes - 1, int(random.paretovariate(1.0)) - 1)
        prompt = prompt_of(1000 + prefix, 400) + prompt_of(5000 + i, 20 + i % 40)
        world.at(1.0 + i * 0.02, lambda i=i, prompt=prompt: world.arrive(request(f"q{i}", prompt)) and None)

    def sample() -> None:
        loads.append([len(one.running) + len(one.waiting) for one in world.replicas.values()])
        world.at(world.now + 0.02, sample)

    world.at(1.0, sample)
    world.run(60.0)
    busy = [load for load in loads if sum(load)]
    means = [sum(load[i] for load in busy) / len(busy) for i in range(4)]
    hits = sum(delta.cached_tokens or 0 for outcome in world.outcomes.values() for delta in outcome.deltas)
    computed = sum(one.prefilled_tokens for one in world.replicas.values())
    return max(means) / (sum(means) / 4), hits / (hits + computed), len(busy) * 0.02


@pytest.mark.parametrize("truth", [GPU, CPU], ids=["gpu", "cpu"])
def test_a_shared_system_prompt_does_not_pile_up_on_one_replica(truth: StepTimeCoefficients) -> None:
    imbalance, _, makespan_s = crowd(CONFIG, truth, prefixes=1)
    _, _, least_requests_s = crowd(CONFIG.model_copy(update={"policy": "least_requests"}), truth, prefixes=1)
    assert imbalance <= 1.5
    assert makespan_s <= least_requests_s / 0.97


def test_without_popularity_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Popularity, "uses", lambda self, key, now: 0.0)
    imbalance, _, _ = crowd(CONFIG, GPU, prefixes=1)
    assert imbalance > 1.5


@pytest.mark.parametrize("truth", [GPU, CPU], ids=["gpu", "cpu"])
def test_ten_system_prompts_keep_their_hits_and_the_balance(truth: StepTimeCoefficients) -> None:
    imbalance, hits, _ = crowd(CONFIG, truth, prefixes=10)
    pure_affinity = (190 * 400) / (200 * 440)
    assert imbalance <= 1.5
    assert hits >= 0.8 * pure_affinity


def conversations(config: RouterConfig) -> float:
    """Five turns of 40 conversations without anything in common: part of the prompt tokens that was cached."""
    world = World(config, [ModelledReplica(f"r{i}") for i in range(4)])
    for turn in range(5):
        for i in range(40):
            prompt = prompt_of(i, 320 * (turn + 1))
            world.at(1.0 + turn * 4 + i * 0.05, lambda i=i, prompt=prompt: world.arrive(request(f"q{i}", prompt)) and None)
    world.run(40.0)
    hits = sum(delta.cached_tokens or 0 for outcome in world.outcomes.values() for delta in outcome.deltas)
    return hits / (hits + sum(one.prefilled_tokens for one in world.replicas.values()))


def test_conversations_come_back_to_their_replica() -> None:
    assert conversations(CONFIG) > 0.6
    assert conversations(CONFIG.model_copy(update={"policy": "least_requests"})) < 0.4, "the control: a policy without affinity"


def test_predicted_hits_are_the_actual_ones() -> None:
    world = World(CONFIG, [ModelledReplica(f"r{i}") for i in range(2)])
    for i in range(60):
        prompt = prompt_of(i % 7, 200) + prompt_of(100 + i, 30)
        world.at(1.0 + i * 0.05, lambda i=i, prompt=prompt: world.arrive(request(f"q{i}", prompt)) and None)
    world.run(30.0)
    fleet = world.board.fleet
    assert fleet.hits_actual_tokens > 5_000
    assert fleet.hits_predicted_tokens == pytest.approx(fleet.hits_actual_tokens, rel=0.05)


def test_aborts_leave_no_credit_and_a_restarted_replica_gets_its_share() -> None:
    """RTR-01, RTR-02."""
    world = World(CONFIG, [ModelledReplica(f"r{i}") for i in range(4)])
    world.run(1.0)
    for i in range(400):
        outcome = world.arrive(request(f"a{i}", prompt_of(i, 100)))
        world.carry_out(world.board.close(outcome.batch_id, world.now))
    assert world.own() == 0
    for i in range(10):
        world.arrive(request(f"long{i}", prompt_of(900 + i, 100), max_tokens=4000))
    world.run(1.2)
    old = world.incarnations["r0"]
    world.kill("r0")
    world.connect(ModelledReplica("r0", epoch=2))
    for attempt in range(500):
        world.board.fleet.release(old, attempt, world.now)
    known = world.board.fleet.get(world.incarnations["r0"])
    assert known is not None
    before = len(world.submits)
    for i in range(400):
        world.at(2.0 + i // 32, lambda i=i: world.arrive(request(f"n{i}", prompt_of(2000 + i, 64))) and None)
    world.run(60.0)
    counts = dict.fromkeys(world.replicas, 0)
    for name, _ in world.submits[before:]:
        counts[name] += 1
    assert all(70 <= count <= 130 for count in counts.values()), counts


def test_with_a_leaking_credit_the_restarted_one_would_get_nearly_all(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    monkeypatch.setattr(ReplicaView, "release", lambda self, attempt: kept.append(attempt))
    world = World(CONFIG, [ModelledReplica(f"r{i}") for i in range(4)])
    world.run(1.0)
    for i in range(400):
        outcome = world.arrive(request(f"a{i}", prompt_of(i, 100)))
        world.carry_out(world.board.close(outcome.batch_id, world.now))
    assert world.own() == 400


def test_a_replica_that_was_full_and_is_now_idle_gets_its_share() -> None:
    """RTR-19: the report is driven by a timer, so an idle replica is not remembered as a full one."""
    world = World(CONFIG, [ModelledReplica(f"r{i}") for i in range(2)])
    world.run(1.0)
    outcomes = [world.arrive(request(f"a{i}", prompt_of(i, 3000), max_tokens=2000)) for i in range(32)]
    world.run(3.0)
    for outcome in outcomes:
        world.carry_out(world.board.close(outcome.batch_id, world.now))
    world.run(4.0)
    assert all(known.view.load.running == 0 for known in world.board.fleet.all())
    before = len(world.submits)
    for i in range(50):
        world.at(4.0 + i * 0.01, lambda i=i: world.arrive(request(f"n{i}", prompt_of(500 + i, 64))) and None)
    world.run(20.0)
    names = [name for name, _ in world.submits[before:]]
    assert 15 <= names.count("r0") <= 35


def streak(scale: float) -> int:
    """60 short prompts on two equal replicas, of which the router learned in long waits that r1 is so much slower: those r1 got."""
    world = World(CONFIG, [ModelledReplica(f"r{i}", truth=GPU) for i in range(2)])
    world.run(1.0)
    known = world.board.fleet.get(world.incarnations["r1"])
    assert known is not None
    for _ in range(30):
        known.calibrations.observe_ttft(10, 0.2, 0.2 * scale, 0.01, 1.0)
    random = Random(1)
    time_s = 1.0
    for i in range(60):
        time_s += random.expovariate(20.0)
        world.at(time_s, lambda i=i: world.arrive(request(f"q{i}", prompt_of(100 + i, 20), max_tokens=60)) and None)
    world.run(time_s + 60)
    return sum(name == "r1" for name, _ in world.submits)


def test_a_streak_of_short_prompts_does_not_herd() -> None:
    assert streak(2.0) >= 18


def test_with_the_learned_scale_on_every_step_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_scale", lambda expected, learned: learned)
    assert streak(2.0) <= 6


def test_a_replica_whose_step_is_overdue_gets_less_before_it_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The breaker: between the last sign of progress and the stall, new work goes elsewhere."""

    def sent_there() -> int:
        world = World(CONFIG, [ModelledReplica(f"r{i}") for i in range(2)])
        for replica in world.replicas.values():
            replica.progress = 1000
        world.run(1.0)
        for i in range(8):
            world.arrive(request(f"busy{i}", prompt_of(i, 60), max_tokens=400))
        world.run(1.5)
        world.freeze("r0")
        world.run(3.2)
        assert not world.notices, "not stalled yet"
        before = len(world.submits)
        for i in range(10):
            world.arrive(request(f"n{i}", prompt_of(100 + i, 40)))
        return sum(name == "r0" for name, _ in world.submits[before:])

    assert sent_there() <= 2
    monkeypatch.setattr(Health, "weight", lambda self, now: 1.0)
    monkeypatch.setattr(ReplicaView, "is_stale", lambda self, now: False)
    assert sent_there() >= 4, "the control"


def test_decisions_say_why_and_what_came_of_it() -> None:
    world = World(CONFIG.model_copy(update={"debug_decisions": 5}), [ModelledReplica(f"r{i}") for i in range(2)])
    world.run(1.0)
    for i in range(8):
        world.arrive(request(f"q{i}", prompt_of(1, 200) + prompt_of(50 + i, 20), max_tokens=5))
        world.run(world.now + 1.0)
    last = world.board.reception.decisions.last()
    assert [one["request_id"] for one in last] == ["q3", "q4", "q5", "q6", "q7"]
    assert world.board.reception.decisions.open == 0
    for one in last:
        candidates = {each["replica"]: each for each in one["candidates"]}  # type: ignore[attr-defined]
        chosen = candidates[one["replica"]]
        assert one["verdict"] == "admitted" and one["reason"] in ("least_delay", "tie")
        assert set(candidates) == {"r0", "r1"}
        actual = one["actual"]
        assert isinstance(actual, dict) and actual["hit_tokens"] == chosen["hit_tokens"] == 192
        assert actual["ttft_s"] > 0 and chosen["ttft_s"] > 0
    off = World(CONFIG, [ModelledReplica("r0")])
    off.arrive(request("q", prompt_of(1, 20)))
    assert len(off.board.reception.decisions) == off.board.reception.decisions.open == 0
