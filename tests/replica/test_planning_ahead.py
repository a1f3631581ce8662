"""A step planned while the one before runs: whatever that brings, nothing wrong is computed, nothing is lost, nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from core_harness import EOS, Driver, PagedRunner, ids, limits

from replica import engine
from replica.config import EngineConfig
from replica.contract.messages import EngineLimits, FinishReason, GenerateRequest, SamplingParams
from replica.mock_runner import MockRunner
from replica.plan import PlanBuilder
from replica.server import ReplicaServer
from replica.step import AsynchronousRunner, Step, StepResult


def busy(ahead: bool, prepare: Callable[[Driver], None] = lambda driver: None, **sizes: int) -> Driver:
    """Twelve requests of all lengths, prefixes shared by some, four at a time; some end by a stop id."""
    driver = Driver(PagedRunner(limits(**{"seqs": 4, "budget": 48, **sizes})), async_scheduling=ahead)
    prepare(driver)
    for i in range(12):
        driver.runner.stop_at[i + 1] = 3 + i if i % 3 == 0 else 1000
        driver.add([*ids(i % 4, 16 + 7 * i), i + 3], 5 + 2 * i, ignore_eos=False, temperature=1.0)
        driver.step()
    driver.run()
    return driver


def texts(driver: Driver) -> list[list[int]]:
    return [driver.text(attempt) for attempt in range(1, 13)]


def test_the_same_texts_in_no_more_steps() -> None:
    between, ahead = busy(False), busy(True)
    assert texts(ahead) == texts(between)
    assert any(text[-1] == EOS for text in texts(ahead)), "some ended unforeseen"
    assert len(ahead.runner.steps) == len(between.runner.steps), "a slot that is given back is taken in the next step"


def test_a_plan_that_is_not_corrected_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: unknown tokens and rows of those who have ended reach the runner."""
    monkeypatch.setattr(PlanBuilder, "catch_up", lambda builder: None)
    with pytest.raises(AssertionError):
        busy(True)


@pytest.mark.parametrize("how", ["cancelled", "row error", "stop id", "cancelled after the step"])
def test_who_has_left_has_no_row_in_the_step_that_was_planned_with_it(how: str) -> None:
    runner = PagedRunner(limits())
    driver = Driver(runner)
    core = driver.engine
    stays, leaves = driver.add(ids(1, 40), 20), driver.add(ids(2, 40), 20, ignore_eos=False)
    for _ in range(5):
        driver.step()
    if how == "row error":
        runner.error_for = lambda row: "no token" if row.request == 1 else ""
    if how == "stop id":
        runner.stop_at[leaves] = len(driver.text(leaves))
    step = core.plan()
    assert step is not None
    core.plan_ahead()
    if how == "cancelled":
        core.cancel(0, leaves)
    driver.take(core.settle(step, runner.execute(step)))
    if how == "cancelled after the step":
        core.cancel(0, leaves)
    following = core.plan()
    assert following is not None and following.step_id == step.step_id + 1
    assert {row.request for row in step.rows} == {0, 1} and {row.request for row in following.rows} == {0}
    driver.take(core.settle(following, runner.execute(following)))
    driver.run()
    assert len(driver.text(stays)) == 20 and len(driver.text(leaves)) < 20


def test_a_deadline_that_passes_while_a_step_runs() -> None:
    driver = Driver(PagedRunner(limits(budget=16)), async_scheduling=True)
    attempt = driver.add(ids(1, 1600), 5, deadline_s=0.05)
    driver.run()
    assert driver.finish(attempt) is FinishReason.TIMEOUT and len(driver.runner.steps) < 10


def failing(ahead: bool) -> Driver:
    """The eighth step raises while the next one is planned, with a start from the cache by copy in it."""
    driver = Driver(PagedRunner(limits(budget=64, seqs=4)), async_scheduling=ahead)
    core = driver.engine
    driver.failures_expected = True
    driver.add(ids(9, 32), 1, seed=9)
    driver.run()
    for i in range(3):
        driver.add(ids(i, 30), 20, seed=i)
    for _ in range(7):
        driver.step()
    step = core.plan()
    assert step is not None
    driver.add(ids(9, 32), 6, seed=9)
    if ahead:
        core.plan_ahead()
        assert len(core.roster.running) == 4 and core.roster.running[-1].computed == 31
    driver.take(core.settle(step, RuntimeError("hiccup")))
    driver.run()
    return driver


def test_a_failed_step_costs_nobody_a_token() -> None:
    ahead, between = failing(True), failing(False)
    assert [ahead.text(n) for n in range(1, 6)] == [between.text(n) for n in range(1, 6)]
    assert all(ahead.finish(n) is FinishReason.LENGTH for n in range(1, 6))
    assert any(output.error for output in ahead.outputs)


def test_unknown_tokens_that_outlive_the_failed_step_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(engine, "expect_nothing", lambda plan: None)
    with pytest.raises(AssertionError):
        failing(True)


def planned_ahead(driver: Driver) -> bool:
    step = driver.engine.plan()
    assert step is not None
    driver.engine.plan_ahead()
    ahead = driver.engine._scheduler._ahead is not None
    driver.take(driver.engine.settle(step, driver.runner.execute(step)))
    driver.run()
    return ahead


def test_what_cannot_be_foreseen_is_not_planned_ahead() -> None:
    """Prompt scores, a pool where somebody may have to yield, an urgent request that waits, the baselines."""
    driver = Driver(PagedRunner(limits(budget=32)))
    driver.add(ids(1, 100), 3)
    assert planned_ahead(driver)
    driver = Driver(PagedRunner(limits(budget=32)))
    driver.add(ids(1, 100), 3, prompt_logprobs=0)
    assert not planned_ahead(driver)
    driver = Driver(PagedRunner(limits(3, seqs=2)))
    driver.add(ids(1, 47), 1)
    assert not planned_ahead(driver)
    driver = Driver(PagedRunner(limits(seqs=1)), scheduling_policy="priority")
    driver.add(ids(1, 20), 3)
    driver.add(ids(2, 20), 3)
    assert not planned_ahead(driver)
    driver = Driver(PagedRunner(limits()), batching="iteration")
    driver.add(ids(1, 20), 3)
    assert not planned_ahead(driver)


def test_planning_ahead_twice_is_planning_ahead_once() -> None:
    driver = Driver(PagedRunner(limits()))
    driver.add(ids(1, 20), 5)
    step = driver.engine.plan()
    assert step is not None
    driver.engine.plan_ahead()
    driver.engine.plan_ahead()
    driver.take(driver.engine.settle(step, driver.runner.execute(step)))
    driver.run()
    assert len(driver.text(1)) == 5 and len(driver.runner.steps) == 5


# --- on the engine's thread ----------------------------------------------------------------------------------------------


class Device(MockRunner):
    """Says what it is told, and when the result is asked for."""

    overlaps = True

    def __init__(self, limits: EngineLimits, log: list[str]) -> None:
        super().__init__(limits)
        self.log = log

    def begin(self, step: Step) -> Callable[[], StepResult]:
        self.log.append("begin")
        return lambda: self.log.append("wait") or self.execute(step)


@pytest.mark.parametrize("wanted", [None, True, False])
async def test_the_loop_plans_while_the_device_computes(monkeypatch: pytest.MonkeyPatch, wanted: bool | None) -> None:
    """Unset, where it computes by itself."""
    log: list[str] = []
    plan_ahead = engine.Engine.plan_ahead
    monkeypatch.setattr(engine.Engine, "plan_ahead", lambda self: log.append("ahead") or plan_ahead(self))
    config = EngineConfig(runner="mock", async_scheduling=wanted)
    server = ReplicaServer(config, replica_id="r", secret=b"a secret of the cluster", runner=Device(limits(), log))
    await server.start()
    loop = server._started().loop
    loop.inbox.submit(1, GenerateRequest(1, "x", 0, (5, 6, 7), (), SamplingParams(seed=1, max_tokens=5, ignore_eos=True)))
    for _ in range(500):
        if loop.pulse().progress == 5:
            break
        await asyncio.sleep(0.01)
    await server.stop()
    assert log == ([] if wanted is False else ["begin", "ahead", "wait"] * 5)


def test_a_device_is_one_that_overlaps() -> None:
    assert isinstance(Device(limits(), []), AsynchronousRunner) and not isinstance(MockRunner(limits()), AsynchronousRunner)
