"""The small deciders by themselves: queue, chunk budget, growth, the mock runner."""

from __future__ import annotations

import pytest
from core_harness import Driver, PagedRunner, ids, limits
from hypothesis import given
from hypothesis import strategies as st

from replica.chunk_budget import ChunkBudget
from replica.config import EngineConfig
from replica.contract.messages import EngineLimits, GenerateRequest, SamplingParams, StepTimeCoefficients
from replica.engine import Engine
from replica.growth import Forecast, GrowthEstimate
from replica.mock_runner import MockRunner, mock_limits, mock_token
from replica.request import Request, State, Terms
from replica.waiting_queue import WaitingQueue


def request(number: int, *, priority: int = 0, length: int = 10, max_tokens: int = 100, ignore_eos: bool = True) -> Request:
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
    message = GenerateRequest(number, "x", 0, tuple(ids(number, length)), (), sampling)
    terms = Terms(owner=0, attempt=number, prompt_length=length, arrival_s=0.0, deadline_s=None, stop_ids=frozenset(), root=b"root")
    return Request(number, message, terms, keys=[], tokens_max=length + max_tokens, priority=priority)


def numbers(queue: WaitingQueue) -> list[int]:
    return [waiting.number for waiting in queue]


# --- the queue -----------------------------------------------------------------------------------------------------------


def test_order_is_class_then_preempted_then_arrival() -> None:
    queue = WaitingQueue(bypasses_max=3)
    preempted = request(4)
    preempted.state = State.PREEMPTED
    for waiting in (request(5), request(1, priority=2), preempted, request(0), request(3, priority=-1)):
        queue.add(waiting)
    assert numbers(queue) == [3, 4, 0, 5, 1]
    assert [waiting.number for waiting in queue.first(2)] == [3, 4]


def test_who_is_passed_too_often_goes_to_the_head_of_its_class() -> None:
    queue = WaitingQueue(bypasses_max=2, rank=lambda waiting: -waiting.number)
    old, urgent = request(0), request(9, priority=-1)
    for waiting in (old, request(1), request(2), urgent):
        queue.add(waiting)
    assert numbers(queue) == [9, 2, 1, 0]
    queue.passed_by(request(3))
    assert not queue.is_aged(old)
    queue.passed_by(request(1))
    assert queue.is_aged(old) and numbers(queue) == [9, 0, 2, 1]


def test_more_urgent_and_later_requests_are_not_passed() -> None:
    queue = WaitingQueue(bypasses_max=2)
    less_urgent, later = request(0, priority=1), request(5)
    for waiting in (less_urgent, later):
        queue.add(waiting)
    queue.passed_by(request(3))
    assert less_urgent.history.bypasses == 0 and later.history.bypasses == 0


def test_removing_who_does_not_wait_is_an_error() -> None:
    with pytest.raises(KeyError):
        WaitingQueue(bypasses_max=1).remove(request(0))


# --- the chunk budget ----------------------------------------------------------------------------------------------------

COST = StepTimeCoefficients(a=0.0, b=1e-3, c=0.0, d=0.0)


def budget(tokens: int, seconds: float | None, coefficients: StepTimeCoefficients = COST) -> ChunkBudget:
    return ChunkBudget(tokens=tokens, seconds=seconds, coefficients=coefficients, block_size=16)


@pytest.mark.parametrize(
    ("tokens", "seconds", "start", "wanted", "fits"),
    [
        (100, None, 0, 50, 50),
        (100, None, 0, 100, 100),
        (100, None, 0, 200, 96),  # cut: ends with a block
        (100, None, 10, 200, 86),
        (10, None, 0, 200, 10),  # less than a block at all
        (100, 0.040, 0, 200, 32),
        (100, -1.0, 0, 200, 16),  # one block always
        (100, -1.0, 5, 200, 11),
        (0, None, 0, 10, 0),
    ],
)
def test_first_chunk(tokens: int, seconds: float | None, start: int, wanted: int, fits: int) -> None:
    assert budget(tokens, seconds).fit(start, wanted) == fits


def test_only_the_first_chunk_has_a_right_to_a_block() -> None:
    step = budget(100, 0.020)
    step.spend(0, step.fit(0, 200))
    assert step.tokens == 84 and step.fit(0, 200) == 0 and step.fit(0, 4) == 4


@pytest.mark.parametrize("start", [0, 1000, 5000])
def test_what_is_afforded_is_the_most_that_the_model_allows(start: int) -> None:
    k = StepTimeCoefficients(a=0.0, b=1e-4, c=0.0, d=1e-6, e=1e-7)
    count = ChunkBudget(tokens=10**6, seconds=0.2, coefficients=k, block_size=1).fit(start, 10**6)

    def cost(n: int) -> float:
        return k.b * n + k.d * (start + n) + k.e * n * (start + n)

    assert cost(count) <= 0.2 < cost(count + 1)


def test_half_is_of_the_seconds_too_and_leaves_the_right_to_a_block() -> None:
    step = budget(100, 0.040)
    half = step.half(0)
    assert half.tokens == 50 and half.fit(0, 20) == 20 and half.fit(0, 21) == 16
    half.spend(0, 20)
    assert half.fit(0, 1) == 0 and step.tokens == 80 and step.fit(0, 200) == 16
    broken = budget(100, -1.0)
    assert broken.half(0).fit(0, 1) == 0 and broken.fit(0, 200) == 16


@pytest.mark.parametrize("e", [0.0, 1e-30, 1e-18, 1e-14])
def test_a_tiny_coefficient_changes_nothing(e: float) -> None:
    assert budget(10**6, 0.0325, StepTimeCoefficients(a=0.0, b=1e-3, c=0.0, d=0.0, e=e)).fit(0, 32) == 32
    assert budget(10**6, 0.0325, StepTimeCoefficients(a=0.0, b=1e-3, c=0.0, d=0.0, e=e)).fit(0, 10**6) == 32


@pytest.mark.parametrize("k", [StepTimeCoefficients(a=0.0, b=0.0, c=0.0, d=0.0), StepTimeCoefficients(a=0.0, b=1e-9, c=0.0, d=0.0)])
def test_a_step_of_no_cost_is_bounded_by_its_tokens(k: StepTimeCoefficients) -> None:
    assert budget(96, 1e305, k).fit(0, 10**6) == 96


# --- growth --------------------------------------------------------------------------------------------------------------


def test_what_cannot_stop_early_is_known_and_the_rest_is_learned() -> None:
    growth = GrowthEstimate()
    assert growth.tokens_to_come(request(0, max_tokens=1000)) == 1000
    unknown = request(1, max_tokens=1000, ignore_eos=False)
    assert growth.tokens_to_come(unknown) == 256
    for _ in range(100):
        growth.learn(40)
    assert growth.tokens_to_come(unknown) == pytest.approx(40, abs=3)
    assert growth.tokens_to_come(request(2, max_tokens=10, ignore_eos=False)) == 10
    unknown.output_ids.extend(range(100))
    unknown.tokens.extend(range(100))
    assert growth.tokens_to_come(unknown) == 25


def test_the_forecast_knows_that_one_may_end_before_another_grows() -> None:
    growth = GrowthEstimate()
    short, long = request(0, length=160, max_tokens=16), request(1, length=160, max_tokens=160)
    for running in (short, long):
        running.history.own_blocks = 10
    newcomer = request(2, length=80, max_tokens=80)

    def forecast(capacity: int) -> Forecast:
        return Forecast(capacity=capacity, in_use=20, block_size=16, running=[short, long], growth=growth)

    # at 16 tokens: 20 + 5 + 3 = 28 blocks, then 10 go; at 80: 15 + 2·5 = 25; at 160: 10 + 10 = 20
    assert forecast(28).fits(newcomer, 5) and not forecast(27).fits(newcomer, 5)
    two = forecast(28)
    two.add(newcomer, 5)
    assert not two.fits(request(3, length=16, max_tokens=16), 1)


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 12)), max_size=7), st.integers(1, 90), st.integers(0, 12), st.integers(1, 120))
def test_the_forecast_is_the_highest_peak_laid_out_step_by_step(
    running: list[tuple[int, int]], to_come: int, needed: int, capacity: int
) -> None:
    growth = GrowthEstimate()
    requests = [request(i, length=16, max_tokens=count) for i, (count, _) in enumerate(running)]
    for one, (_, blocks) in zip(requests, running, strict=True):
        one.history.own_blocks = blocks
    in_use = 3 + sum(blocks for _, blocks in running)
    forecast = Forecast(capacity=capacity, in_use=in_use, block_size=4, running=[], growth=growth)
    if requests:  # the last one has been started in this step
        forecast = Forecast(capacity=capacity, in_use=in_use - running[-1][1], block_size=4, running=requests[:-1], growth=growth)
        forecast.add(requests[-1], running[-1][1])
    everyone = [*running, (to_come, needed)]
    peak = max(
        3 + sum(blocks + -(-time // 4) for left, blocks in everyone if left >= time)  # just before the end at `time`
        for time, _ in everyone
    )
    assert forecast.fits(request(99, length=16, max_tokens=to_come), needed) == (peak <= capacity)


def test_without_the_forecast_the_pool_is_over_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    def preemptions() -> int:
        driver = Driver(PagedRunner(limits(90, seqs=12)), check=False)
        for i in range(12):
            driver.add(ids(i, 60), 200)
        driver.run()
        return driver.engine.roster.preemptions

    assert preemptions() == 0
    monkeypatch.setattr(Forecast, "fits", lambda forecast, request, needed: True)
    assert preemptions() > 5


# --- the mock runner -----------------------------------------------------------------------------------------------------


def generate(runner: MockRunner, attempts: list[GenerateRequest]) -> dict[int, list[int]]:
    engine = Engine(runner, EngineConfig(), "m", "r", lambda: 0.0)
    for message in attempts:
        assert engine.submit(0, message) is None
    texts: dict[int, list[int]] = {message.attempt: [] for message in attempts}
    while engine.has_work:
        output = engine.step()
        assert output is not None and not output.error
        for _, delta in output.deltas:
            texts[delta.attempt].extend(delta.token_ids)
            assert len(delta.logprobs) == len(delta.token_ids)
    return texts


def mock_message(attempt: int, seed: int, max_tokens: int = 20, choice: int = 0, **changes: object) -> GenerateRequest:
    sampling = SamplingParams(seed=seed, max_tokens=max_tokens, logprobs=2, **changes)  # type: ignore[arg-type]
    return GenerateRequest(attempt, "x", choice, (1, 2, 3), (), sampling)


def test_mock_tokens_depend_on_seed_choice_and_position_alone() -> None:
    small = EngineLimits(512, 4, 64, 32, 16, 64, 50)
    together = generate(MockRunner(small), [mock_message(i, seed=i) for i in range(6)])
    for i in range(6):
        assert generate(MockRunner(small), [mock_message(i, seed=i)])[i] == together[i]
    assert together[0] != together[1]
    assert generate(MockRunner(small), [mock_message(0, seed=0, choice=1)])[0] != together[0]
    assert all(2 not in text and len(text) == 20 for text in together.values())


def test_the_mock_stops_only_when_told() -> None:
    small = EngineLimits(512, 4, 64, 32, 16, 64, 4)
    text = generate(MockRunner(small), [mock_message(0, seed=3, stop_token_ids=(1,))])[0]
    assert len(text) == 20 and not {1, 2} & set(text)
    stopping = generate(MockRunner(small, stop_after=5), [mock_message(0, seed=3), mock_message(1, seed=3, min_tokens=9)])
    assert len(stopping[0]) == 5 and stopping[0][-1] == 2
    assert len(stopping[1]) == 10


def test_the_mock_takes_its_time_from_the_configuration() -> None:
    slept: list[float] = []
    runner = MockRunner.from_config(EngineConfig(runner="mock", mock_step_ms=7.0, max_num_seqs=3), sleep=slept.append)
    generate(runner, [mock_message(0, seed=1, max_tokens=3)])
    assert slept == [pytest.approx(0.007)] * 3 and runner.steps == 3 and runner.tokens == 5
    assert runner.limits.max_num_seqs == 3 and runner.limits.max_model_len == 8192
    with pytest.raises(ValueError, match="does not fit"):
        mock_limits(EngineConfig(max_model_len=4096, num_gpu_blocks_override=100))
    assert mock_limits(EngineConfig(num_gpu_blocks_override=100)).max_model_len == 1600


def test_mock_tokens_are_spread() -> None:
    assert len({mock_token(seed, 0, position, 49_152) for seed in range(10) for position in range(100)}) > 980
