"""Admission at five times the capacity (ADM-01), and a burst on one replica: virtual clock, production switchboard."""

from collections.abc import Sequence
from random import Random

import pytest

from replica.contract.messages import StepTimeCoefficients
from router.config import RouterConfig
from router.policy.admission import Admission, Outlay, Promise, Shed
from router.policy.calibration import TRUSTED_AFTER, Calibration
from tests.router.modelled_replica import CPU, GPU, ModelledReplica, limits
from tests.router.virtual_world import Outcome, World, prompt_of, request

SLO_S = 2.0
CONFIG = RouterConfig(queue_time_slo_s=SLO_S, queue_depth_max=64, queue_tokens_max=40_000)


def scaled(k: StepTimeCoefficients, by: float) -> StepTimeCoefficients:
    return StepTimeCoefficients(k.a * by, k.b * by, k.c * by, k.d * by)


def offer(
    rate: float,
    seconds: float,
    config: RouterConfig = CONFIG,
    *,
    told: StepTimeCoefficients | None = None,
    replicas: int = 1,
    tokens: int = 100,
) -> tuple[World, list[Outcome], list[int]]:
    """Poisson arrivals; also the router's queue depth, sampled at every arrival."""
    world = World(config, [ModelledReplica(f"r{i}", truth=CPU, told=told) for i in range(replicas)])
    random = Random(3)
    outcomes: list[Outcome] = []
    depths: list[int] = []

    def arrive(i: int) -> None:
        outcomes.append(world.arrive(request(f"q{i}", prompt_of(i, tokens + i % 50), max_tokens=40)))
        depths.append(world.board.reception.queue.depth)

    time_s, i = 0.5, 0
    while time_s < seconds:
        time_s += random.expovariate(rate)
        i += 1
        world.at(time_s, lambda i=i: arrive(i))
    world.run(seconds)
    return world, outcomes, depths


def served(outcomes: list[Outcome]) -> int:
    return sum(bool(outcome.finishes()) for outcome in outcomes)


@pytest.fixture(scope="module")
def peak() -> float:
    """Requests/s that one replica completes when everything is admitted."""
    _, outcomes, _ = offer(10.0, 60.0, CONFIG.model_copy(update={"queue_time_slo_s": 10_000.0, "queue_depth_max": 10_000}))
    return served(outcomes) / 60.0


@pytest.mark.parametrize("wrong", [1.0, 0.5, 2.0], ids=["right", "half", "double"])
def test_five_times_the_capacity_for_a_minute(peak: float, wrong: float) -> None:
    world, outcomes, depths = offer(5 * peak, 60.0, told=scaled(CPU, wrong))
    times = world.queue_times()
    assert times[int(0.95 * len(times))] <= SLO_S
    assert served(outcomes) / 60.0 >= 0.9 * peak
    assert max(depths) <= CONFIG.queue_depth_max
    rejected = [outcome for outcome in outcomes if outcome.rejected]
    assert {outcome.rejected.status for outcome in rejected if outcome.rejected} == {429}
    assert all(outcome.rejected.retry_after_s and outcome.rejected.retry_after_s > 0 for outcome in rejected if outcome.rejected)
    for outcome in rejected:
        assert outcome.rejected_s is not None
        assert not outcome.deltas
        assert outcome.rejected_s - outcome.batch.arrival_s <= SLO_S + 0.05, "shed within 50 ms of becoming hopeless"
    world.run(120.0)
    assert (world.own(), len(world.board.traffic.dispatches)) == (0, 0)


def test_without_admission_the_promise_would_be_broken(peak: float) -> None:
    """The control: the same load with an SLO that never sheds; waits grow with time."""
    world, _, _ = offer(5 * peak, 30.0, CONFIG.model_copy(update={"queue_time_slo_s": 1000.0, "queue_depth_max": 10_000}))
    times = world.queue_times()
    assert times[int(0.95 * len(times))] > 5 * SLO_S


def test_a_wrong_model_uncalibrated_breaks_the_promise(peak: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calibration, "observe", lambda self, *rest: None)
    world, _, _ = offer(5 * peak, 30.0, told=scaled(CPU, 0.4))
    times = world.queue_times()
    assert times[int(0.95 * len(times))] > SLO_S


def test_below_capacity_nothing_is_shed(peak: float) -> None:
    _, outcomes, _ = offer(0.8 * peak, 60.0)
    assert not [outcome for outcome in outcomes if outcome.rejected]


def test_several_replicas_share_an_overload(peak: float) -> None:
    world, outcomes, _ = offer(3 * 3 * peak, 30.0, replicas=3)
    times = world.queue_times()
    assert times[int(0.95 * len(times))] <= SLO_S
    assert served(outcomes) / 30.0 >= 0.85 * 3 * peak, "the first seconds fill the batch"


def burst(truth: StepTimeCoefficients) -> tuple[World, list[Outcome]]:
    """On a replica that has served a little before: its model is believed."""
    world = World(CONFIG, [ModelledReplica("r0", truth=truth)])
    for i in range(12):
        world.at(1.0 + i, lambda i=i: world.arrive(request(f"calm{i}", prompt_of(1000 + i, 400), max_tokens=16)) and None)
    world.run(20.0)
    outcomes = [world.arrive(request(f"q{i}", prompt_of(i, 400))) for i in range(160)]
    world.run(60.0)
    return world, outcomes


def test_a_burst_of_160_on_one_replica() -> None:
    faster = StepTimeCoefficients(a=0.008, b=1 / 1_800, c=0.0015, d=1e-6)
    world, outcomes = burst(faster)
    assert served(outcomes) >= 8
    assert all(bool(outcome.finishes()) != (outcome.rejected is not None) for outcome in outcomes)
    assert {outcome.rejected.status for outcome in outcomes if outcome.rejected} == {429}
    at_once = sum(outcome.rejected_s == outcome.batch.arrival_s for outcome in outcomes)
    assert at_once >= 130, "hopeless at arrival is said at arrival"
    assert world.queue_times()[-1] <= SLO_S
    assert world.own() == 0


def test_retry_after_spreads_those_who_are_told_to_come_back() -> None:
    _, outcomes = burst(CPU)
    told = sorted(outcome.rejected.retry_after_s or 0.0 for outcome in outcomes if outcome.rejected)
    assert told[0] > 0
    assert told[-1] > 20, "the last of 154 will not be served sooner"
    assert told[-1] <= 30 * 1.25


def test_judging_the_head_again_tells_nobody_to_come_later() -> None:
    """Every frame of a busy replica judges the head of the queue: that is no refusal, and moves no Retry-After."""
    config = CONFIG.model_copy(update={"queue_time_slo_s": 3.0})

    def retry_after(judged: int) -> float:
        world = World(config, [ModelledReplica("r0", truth=CPU)])
        world.run(1.0)
        outcomes = [world.arrive(request(f"q{i}", prompt_of(i, 300), max_tokens=200)) for i in range(60)]
        (known,) = world.board.fleet.routable()
        known.calibrations.wait.observations = TRUSTED_AFTER
        head = world.board.reception.queue.head()
        assert head is not None
        late = head.deadline_s + 0.001  # hopeless there now
        for _ in range(judged):
            assert world.board.reception.head((known,), late) is None
        world.now = late
        last = world.arrive(request("last", prompt_of(99, 300), max_tokens=200))
        assert outcomes and last.rejected is not None and last.rejected.retry_after_s is not None
        return last.rejected.retry_after_s

    assert retry_after(500) == retry_after(0)


def test_of_many_replicas_a_refusal_is_one_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking first a sample and then everyone must not put off Retry-After twice."""
    sheds: list[float] = []
    shed = Admission.shed

    def counted(self: Admission, promise: Promise, outlays: Sequence[Outlay], now: float) -> Shed:
        sheds.append(now)
        return shed(self, promise, outlays, now)

    monkeypatch.setattr(Admission, "shed", counted)
    small = limits(max_num_seqs=2)
    world = World(
        CONFIG.model_copy(update={"queue_time_slo_s": 1.0}), [ModelledReplica(f"r{i}", truth=CPU, limits=small) for i in range(20)]
    )
    world.run(1.0)
    outcomes = [world.arrive(request(f"q{i}", prompt_of(i, 300), max_tokens=400)) for i in range(400)]
    assert 0 < len(sheds) == sum(outcome.rejected is not None for outcome in outcomes)


def test_an_empty_replica_admits_whatever_the_model_says() -> None:
    hopeless = scaled(CPU, 1000.0)
    world = World(CONFIG, [ModelledReplica("r0", truth=CPU, told=hopeless)])
    for i in range(5):
        world.at(1.0 + 5 * i, lambda i=i: world.arrive(request(f"q{i}", prompt_of(i, 400))) and None)
    world.run(40.0)
    assert served(list(world.outcomes.values())) == 5


def test_without_that_rule_it_would_refuse_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "_keeps", lambda self, one, promise, now: one.wait_s(0.98, now) + 1e9 <= promise.slo_s)
    world = World(CONFIG, [ModelledReplica("r0", truth=CPU)])
    world.at(1.0, lambda: world.arrive(request("q", prompt_of(1, 400))) and None)
    world.run(10.0)
    assert served(list(world.outcomes.values())) == 0


def cold_start(too_slow: float) -> list[Outcome]:
    """A fresh replica whose model says that it is so much slower than it is; 16 short requests at once, SLO 10 s."""
    config = RouterConfig(queue_time_slo_s=10.0)
    world = World(config, [ModelledReplica("r0", truth=CPU, told=scaled(CPU, too_slow))])
    world.run(1.0)
    outcomes = [world.arrive(request(f"q{i}", prompt_of(i, 120), max_tokens=16)) for i in range(16)]
    world.run(30.0)
    return outcomes


@pytest.mark.parametrize("too_slow", [1.0, 5.0, 10.0])
def test_a_fresh_replica_with_a_model_fitted_to_a_stalled_step_refuses_nobody(too_slow: float) -> None:
    assert served(cold_start(too_slow)) == 16


def test_without_doubt_it_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calibration, "doubt", 1.0)
    assert served(cold_start(10.0)) < 16


def test_no_replica_is_503_and_a_prompt_that_never_fits_is_400() -> None:
    world = World(CONFIG, [])
    outcome = world.arrive(request("q", prompt_of(1, 10)))
    assert outcome.rejected is not None
    assert (outcome.rejected.status, outcome.rejected.reason) == (503, "no_replica")
    world.connect(ModelledReplica("r0", limits=limits(max_model_len=100)))
    outcome = world.arrive(request("q", prompt_of(1, 100)))
    assert outcome.rejected is not None
    assert outcome.rejected.status == 400
    assert "100 tokens" in outcome.rejected.message
    assert served([world.arrive(request("q", prompt_of(1, 99), max_tokens=1))]) == 0
    world.run(5.0)
    assert served(list(world.outcomes.values())) == 1


def test_client_errors_count_against_no_replica() -> None:
    """RTR-15: 50 over-long prompts, also ones that only the replica refuses; then 20 valid ones."""
    world = World(CONFIG, [ModelledReplica("r0", truth=GPU, limits=limits(max_model_len=512))])
    world.run(1.0)
    bad = [world.arrive(request(f"b{i}", prompt_of(i, 600))) for i in range(25)]
    real = world.replicas["r0"].limits
    world.replicas["r0"].limits = limits(max_model_len=16)
    bad += [world.arrive(request(f"c{i}", prompt_of(i, 100))) for i in range(25)]
    world.run(2.0)
    world.replicas["r0"].limits = real
    good = [world.arrive(request(f"g{i}", prompt_of(i, 100))) for i in range(20)]
    world.run(20.0)
    assert [outcome.rejected.status for outcome in bad if outcome.rejected] == [400] * 50
    assert served(good) == 20
    assert not world.notices


def test_back_pressure_is_neutral_and_bounded() -> None:
    """RTR-16: a replica whose queue is full bounces; retries stay within their budget, and it serves again at once."""
    small = limits(max_waiting=4, max_num_seqs=4)
    world = World(CONFIG, [ModelledReplica(f"r{i}", truth=CPU) for i in range(2)])
    world.run(1.0)
    for replica in world.replicas.values():
        replica.limits = small  # others fill its queue: less fits than this router believes
    outcomes = [world.arrive(request(f"q{i}", prompt_of(i, 20), max_tokens=20)) for i in range(40)]
    world.run(30.0)
    assert world.board.traffic.tally.retries > 0
    assert served(outcomes) >= 8
    assert all(outcome.rejected.status == 429 for outcome in outcomes if outcome.rejected)
    assert world.board.traffic.tally.retries <= 3 + 0.1 * 40
    again = [world.arrive(request(f"n{i}", prompt_of(i, 20), max_tokens=20)) for i in range(6)]
    world.run(60.0)
    assert served(again) == 6
    assert not world.notices


def test_a_cancel_while_waiting_leaves_nothing() -> None:
    """ADM-03: 200 rounds of ten that wait at the router and go."""
    config = CONFIG.model_copy(update={"queue_depth_max": 10, "queue_time_slo_s": 5.0})
    world = World(config, [ModelledReplica("r0", truth=CPU)])
    world.run(1.0)
    queue = world.board.reception.queue
    while not queue.depth:
        world.arrive(request("busy", prompt_of(len(world.outcomes), 700), max_tokens=2000))
    last = max(world.outcomes)
    world.carry_out(world.board.close(last, world.now))
    waited = 0
    for i in range(200):
        outcomes = [world.arrive(request(f"q{i}.{j}", prompt_of(100 + i, 300))) for j in range(10)]
        waited += queue.depth
        assert queue.depth <= 10
        for outcome in outcomes:
            world.carry_out(world.board.close(outcome.batch_id, world.now))
        assert (queue.depth, queue.tokens, len(queue)) == (0, 0, 0)
    assert waited > 200
