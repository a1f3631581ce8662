"""The baselines do what they say, in exact steps, and every policy writes the same texts."""

from __future__ import annotations

import pytest
from core_harness import Driver, PagedRunner, ids, limits

from replica.config import EngineConfig
from replica.contract.messages import GenerateRequest, SamplingParams
from replica.engine import Engine
from replica.mock_runner import MockRunner
from replica.request import Request
from replica.victim import choose_latest

LADDER: dict[str, dict[str, object]] = {
    "static": {"batching": "static", "enable_chunked_prefill": False, "enable_prefix_caching": False},
    "iteration": {"batching": "iteration", "enable_chunked_prefill": False, "enable_prefix_caching": False},
    "chunked": {"batching": "iteration", "enable_prefix_caching": False},
    "cached": {"batching": "iteration"},
    "ours": {},
    "ours whole": {"enable_chunked_prefill": False},
}


def started(driver: Driver, attempt: int) -> int:
    """Number of the first step (from 1) with a row of `attempt`."""
    return next(i for i, step in enumerate(driver.runner.steps, 1) if any(row.request == attempt - 1 for row in step.rows))


@pytest.mark.parametrize(("batching", "step"), [("static", 11), ("iteration", 3), ("adaptive", 3)])
def test_a_static_batch_runs_until_its_last_member_ends(batching: str, step: int) -> None:
    driver = Driver(PagedRunner(limits(seqs=3)), batching=batching)
    for i, max_tokens in enumerate((2, 10, 2)):
        driver.add(ids(i, 20), max_tokens)
    late = driver.add(ids(7, 20), 2)
    driver.run()
    assert started(driver, late) == step


def test_a_static_batch_is_filled_over_several_steps_and_then_closed() -> None:
    """Whoever comes when nobody more fitted waits for the next batch."""
    driver = Driver(PagedRunner(limits(seqs=8, budget=160)), batching="static")
    batch = [driver.add(ids(i, 100), 20) for i in range(3)]
    for _ in range(3):
        driver.step()
    late = driver.add(ids(9, 10), 2)
    driver.run()
    assert [started(driver, attempt) for attempt in batch] == [1, 1, 2]
    assert started(driver, late) == 22  # the last member draws its twentieth token in step 21


def test_members_that_ended_keep_their_slots() -> None:
    """While a batch is still being filled, a slot that becomes free is not given away."""
    driver = Driver(PagedRunner(limits(seqs=2, budget=100)), batching="static", enable_chunked_prefill=False)
    driver.add(ids(1, 90), 2)
    driver.add(ids(2, 90), 5)
    late = driver.add(ids(3, 20), 1)
    driver.run()
    assert started(driver, late) == 7


@pytest.mark.parametrize(("chunked", "chunks"), [(True, [256, 256, 88]), (False, [600])])
def test_without_chunks_a_prompt_is_computed_in_one_step(chunked: bool, chunks: list[int]) -> None:
    driver = Driver(PagedRunner(limits(budget=256)), enable_chunked_prefill=chunked)
    driver.runner.budget = 600
    driver.add(ids(1, 600), 1)
    driver.run()
    assert [len(row.tokens) for step in driver.runner.steps for row in step.rows] == chunks


def test_without_chunks_a_second_prompt_joins_only_if_all_of_it_fits() -> None:
    driver = Driver(PagedRunner(limits(budget=256)), enable_chunked_prefill=False)
    for i, length in enumerate((150, 100, 10)):
        driver.add(ids(i, length), 1)
    driver.run()
    assert [[len(row.tokens) for row in step.rows] for step in driver.runner.steps] == [[150, 100], [10]]


@pytest.mark.parametrize(("batching", "passed"), [("iteration", False), ("adaptive", True)])
def test_the_baseline_lets_nobody_pass_a_head_that_does_not_fit(batching: str, passed: bool) -> None:
    driver = Driver(PagedRunner(limits(160, budget=2048)), batching=batching)
    driver.add(ids(1, 900), 60)
    driver.step()
    head = driver.add(ids(2, 2400), 1)
    small = driver.add(ids(3, 64), 4)
    driver.run()
    assert (started(driver, small) < started(driver, head)) == passed


def test_the_baseline_makes_the_latest_yield() -> None:
    runner = PagedRunner(limits())
    driver = Driver(runner)
    for i in range(3):
        driver.add(ids(i, 20 + 10 * i), 5)
    driver.step()
    running = driver.engine.roster.running

    def cost(request: Request) -> int:
        return request.computed

    latest = choose_latest(running, cost)
    assert latest is not None and latest.number == 2
    assert choose_latest(running[:1], cost) is None


@pytest.mark.parametrize(("blocks", "steps", "recomputed"), [(3276, 737, 11412), (2457, 946, 19522), (1638, 1092, 18268)])
def test_the_baseline_takes_the_steps_and_tokens_that_vllm_takes(blocks: int, steps: int, recomputed: int) -> None:
    """64 requests of 512 + 512 tokens in 80, 60 and 40 % of the KV they need: 14.8, 23.0 and 21.8 % of all tokens are recomputed."""
    runner = MockRunner(limits(blocks, seqs=64, budget=2048))
    engine = Engine(runner, EngineConfig(batching="iteration"), "m", "r", lambda: 0.0)
    for i in range(64):
        sampling = SamplingParams(seed=i, max_tokens=512, ignore_eos=True)
        assert engine.submit(0, GenerateRequest(i, str(i), 0, tuple(ids(i, 512)), (), sampling)) is None
    while engine.has_work:
        engine.step()
    assert (runner.steps, runner.tokens - 64 * 1023) == (steps, recomputed)


@pytest.mark.parametrize("policy", LADDER)
@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_every_policy_writes_the_same_texts(policy: str, order: str) -> None:
    """In a tiny pool where somebody is made to yield every seventh step; against a pool and a budget that force nothing."""
    small = Driver(PagedRunner(limits(24, seqs=6, budget=64)), scheduling_policy=order, **LADDER[policy])
    large = Driver(PagedRunner(limits(1024, budget=4096)))
    small.runner.budget = 64 + 150
    for i in range(20):
        for driver in (small, large):
            driver.add(ids(i % 4, 20 + 7 * i), 5 + 6 * (i % 7), ignore_eos=False, priority=i % 3)
    while small.engine.has_work:
        small.step()
        running = small.engine.roster.running
        if running and len(small.runner.steps) % 7 == 0:
            small.engine.roster.preempt(running[-1])
    large.run()
    assert all(small.text(attempt) == large.text(attempt) for attempt in range(1, 21))
    assert small.engine.roster.preemptions > 0
