"""Before the first real request a replica knows how long its steps take, and nothing else has changed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from replica.config import EngineConfig
from replica.contract.messages import StepTimeCoefficients
from replica.contract.step_time import predict_step_s
from replica.engine_thread import EngineThread
from replica.mock_runner import MockRunner, mock_limits
from replica.server import ReplicaServer
from replica.step import Step, StepResult
from replica.step_time_fit import PRIOR, StepTimeFit
from replica.warm_up import rounds, touches, warm_up

SLOW = StepTimeCoefficients(a=0.04, b=0.002, c=0.003, d=2e-6, e=1e-8)  # a machine ten times slower than the prior thinks


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class JoltedRunner(MockRunner):
    """Its first steps take a second more, as where kernels are chosen and memory is touched for the first time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(mock_limits(EngineConfig()), SLOW, sleep=clock.sleep)
        self._clock = clock

    def execute(self, step: Step) -> StepResult:
        if self.steps < 12:
            self._clock.sleep(1.0)
        return super().execute(step)


@pytest.mark.parametrize(("prefill", "decodes"), [(512, 0), (0, 8), (400, 4), (0, 32)])
def test_the_first_real_step_is_predicted_within_a_fifth(prefill: int, decodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replica.warm_up.TIME_MAX_S", 1e9)
    clock = Clock()
    learnt = warm_up(JoltedRunner(clock), EngineConfig(), clock).coefficients
    context = 200 * decodes + prefill

    def predicted(coefficients: StepTimeCoefficients) -> float:
        return predict_step_s(coefficients, prefill_tokens=prefill, decodes=decodes, context_tokens=context)

    assert predicted(learnt) == pytest.approx(predicted(SLOW), rel=0.2)
    assert predicted(PRIOR) < 0.8 * predicted(SLOW)  # without a warm-up it is not


def test_a_slow_machine_is_not_held_up() -> None:
    clock = Clock()
    runner = MockRunner(mock_limits(EngineConfig()), StepTimeCoefficients(a=3.0, b=0.0, c=0.0, d=0.0), sleep=clock.sleep)
    warm_up(runner, EngineConfig(), clock)
    longest_round_s = 3.0 * max(r.output_tokens + 4 for r in rounds(runner.limits))
    assert clock.now_s <= 2 * (5.0 + longest_round_s)


@pytest.mark.parametrize(("context", "seqs", "budget"), [(2, 1, 1), (16, 1, 512), (40, 64, 16), (8192, 64, 2048)])
def test_rounds_fit_every_engine(context: int, seqs: int, budget: int) -> None:
    config = EngineConfig(max_model_len=context, max_num_seqs=seqs, max_num_batched_tokens=budget)
    limits = mock_limits(config)
    for each in rounds(limits):
        assert 1 <= each.requests <= seqs
        assert each.prompt_tokens + each.output_tokens <= limits.max_model_len
    runner = MockRunner(limits)
    warm_up(runner, config, Clock())
    assert (runner.steps > 0) == (len(rounds(limits)) > 0)


class WatchedRunner(MockRunner):
    threads: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, config: EngineConfig, sleep: Callable[[float], None] = lambda _: None) -> MockRunner:
        cls.threads = (threading.get_ident(),)
        return cls(mock_limits(config), sleep=sleep)

    def execute(self, step: Step) -> StepResult:
        WatchedRunner.threads += (threading.get_ident(),)
        return super().execute(step)


async def test_runner_is_made_and_run_on_one_thread_that_is_not_the_event_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replica.server.MockRunner", WatchedRunner)
    server = ReplicaServer(EngineConfig(runner="mock"), replica_id="r", secret=b"s")
    await server.start()
    try:
        assert len(set(WatchedRunner.threads)) == 1
        assert WatchedRunner.threads[0] != threading.get_ident()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        assert names[WatchedRunner.threads[0]] == "engine"
    finally:
        await server.stop()


def test_a_call_that_raises_does_not_end_the_thread() -> None:
    thread = EngineThread()

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        thread.submit(fail).result(timeout=60)
    assert thread.submit(threading.get_ident).result(timeout=60) != threading.get_ident()
    thread.end()
    thread.join(60)
    assert not thread.is_alive


class Device(MockRunner):
    """Compiles for each shape."""

    overlaps = True

    def begin(self, step: Step) -> Callable[[], StepResult]:
        return lambda: self.execute(step)


def test_the_first_pass_is_brief_only_where_nothing_depends_on_the_shape() -> None:
    config = EngineConfig()

    def computed(kind: type[MockRunner]) -> float:
        clock = Clock()
        per_token = StepTimeCoefficients(a=0.0, b=1e-4, c=0.0, d=0.0)
        warm_up(kind(mock_limits(config), per_token, sleep=clock.sleep), config, clock)
        return clock.now_s / 1e-4

    asked = sum(r.requests * r.prompt_tokens for r in rounds(mock_limits(config)))
    assert computed(Device) == pytest.approx(2 * asked, rel=0.05)
    assert computed(MockRunner) == pytest.approx(1.5 * asked, rel=0.05)


@pytest.mark.parametrize("context", [2, 20, 512])
def test_a_replica_that_is_told_what_steps_take_touches_memory_and_measures_nothing(context: int) -> None:
    config = EngineConfig(max_model_len=context)
    clock = Clock()
    runner = MockRunner(mock_limits(config), SLOW, sleep=clock.sleep)
    told = StepTimeCoefficients(a=1.0, b=2.0, c=3.0, d=4.0, e=5.0)
    learnt = warm_up(runner, config, clock, told)
    assert learnt.coefficients == told and learnt.observed == 0
    assert (0 < runner.steps <= 8) == (len(touches(runner.limits)) > 0)
    untold = MockRunner(mock_limits(config), SLOW, sleep=clock.sleep)
    warm_up(untold, config, clock)
    assert runner.steps < untold.steps or context == 2


def test_what_compiles_for_each_shape_does_so_although_it_is_told() -> None:
    config = EngineConfig()
    told = Device(mock_limits(config))
    warm_up(told, config, Clock(), SLOW)
    untold = Device(mock_limits(config))
    warm_up(untold, config, Clock())
    assert 2 * told.steps == untold.steps


async def test_what_a_server_is_told_is_what_it_predicts_with(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[StepTimeCoefficients | None] = []

    def listening(runner: MockRunner, config: EngineConfig, clock: Callable[[], float], known: StepTimeCoefficients | None) -> StepTimeFit:
        heard.append(known)
        return StepTimeFit(known or PRIOR)

    asked: list[tuple[str, ...]] = []

    def recall(computes: tuple[str, ...]) -> StepTimeCoefficients:
        asked.append(computes)
        return SLOW

    def runner(config: EngineConfig) -> MockRunner:
        held = MockRunner.from_config(config)
        held.fingerprint, held.kernels = "weights", "C++ step"  # type: ignore[attr-defined]
        return held

    monkeypatch.setattr("replica.server.warm_up", listening)
    monkeypatch.setattr("replica.server.MockRunner", type("NoMock", (), {"from_config": runner}))
    server = ReplicaServer(EngineConfig(runner="mock"), replica_id="r", secret=b"s", recall_step_time=recall)
    await server.start()
    try:
        assert asked == [("weights", "", "", "C++ step")]  # and so of another model or other kernels it is told nothing
        assert heard == [SLOW] and server.step_time == SLOW
    finally:
        await server.stop()
