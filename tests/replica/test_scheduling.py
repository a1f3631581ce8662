"""The order of work: decodes first, bounded chunks, skip-ahead within its bound, nothing unschedulable."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from core_harness import COST, Driver, PagedRunner, ids, limits

from replica import chunks
from replica.chunk_budget import ChunkBudget
from replica.chunks import chunk_row
from replica.contract.messages import BounceReason, FinishReason, GenerateRequest, SamplingParams, StepTimeCoefficients
from replica.mock_runner import modelled_step_s
from replica.plan import Shape
from replica.scheduling_policy import BYPASSES_MAX
from replica.step import Row, Step
from replica.step_time_fit import StepTimeFit


def message(prompt_length: int, max_tokens: int = 8, attempt: int = 900) -> GenerateRequest:
    return GenerateRequest(
        attempt, "x", 0, tuple(ids(1, prompt_length)), (), SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
    )


def started(driver: Driver, attempt: int) -> int:
    """Number of the first step (from 1) with a row of `attempt`; attempts count from 1, request numbers from 0."""
    return next(i for i, step in enumerate(driver.runner.steps, 1) if any(row.request == attempt - 1 for row in step.rows))


# --- what can never run is refused, what is too long is cut (SCH-01, SCH-11) ---------------------------------------------


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers_and_holds_nobody_up() -> None:
    driver = Driver(PagedRunner(limits(16, context=512)))
    bounce = driver.engine.submit(0, message(300))
    assert bounce is not None and bounce.reason is BounceReason.NEVER_FITS
    assert "301" in bounce.message and "256" in bounce.message
    attempts = [driver.add(ids(i, 10), 8) for i in range(10)]
    driver.run()
    assert all(driver.finish(attempt) is FinishReason.LENGTH for attempt in attempts)


@pytest.mark.parametrize(("prompt", "taken"), [(255, True), (256, False)])
def test_the_limit_is_prompt_plus_one(prompt: int, taken: bool) -> None:
    driver = Driver(PagedRunner(limits(16, context=512)))
    assert (driver.engine.submit(0, message(prompt)) is None) == taken
    driver.run()


def test_max_tokens_beyond_the_pool_ends_by_length_when_it_is_full() -> None:
    driver = Driver(PagedRunner(limits(16, context=512)))
    attempt = driver.add(ids(1, 200), 100)
    driver.run()
    assert len(driver.text(attempt)) == 56 and driver.finish(attempt) is FinishReason.LENGTH


@pytest.mark.parametrize("max_tokens", [28, 29, 1000, 2**31 - 1])
def test_generation_ends_exactly_at_the_context(max_tokens: int) -> None:
    driver = Driver(PagedRunner(limits(context=128)))
    attempt = driver.add(ids(1, 100), max_tokens)
    driver.run()
    assert len(driver.text(attempt)) == 28 and driver.finish(attempt) is FinishReason.LENGTH
    assert driver.engine.roster.kv.pool.referenced == 0


def test_without_the_clamp_it_would_go_on() -> None:
    """Negative control of the test above."""
    driver = Driver(PagedRunner(limits(context=128)))
    driver.engine._intake._context_tokens = 10**9
    attempt = driver.add(ids(1, 100), 1000)
    for _ in range(40):
        driver.step()
    assert len(driver.text(attempt)) > 28


def test_a_full_queue_bounces() -> None:
    driver = Driver(PagedRunner(limits(waiting=3)))
    for i in range(3):
        driver.add(ids(i, 10), 2)
    bounce = driver.engine.submit(0, message(10))
    assert bounce is not None and bounce.reason is BounceReason.QUEUE_FULL
    driver.run()
    assert driver.engine.ledger.accepted == 3


# --- decodes first, chunks bounded (SCH-04; with its trace: test_case_traces) ---


def decodes_of(step: Step) -> int:
    return sum(1 for row in step.rows if len(row.tokens) == 1 and row.draw is not None)


def long_prefill(slo_ms: float, budget: int = 256) -> tuple[Driver, list[Step]]:
    """Four streams, then a prompt of 1,900 and thirty of 500: the driver, and the steps from the long prompt on."""
    driver = Driver(PagedRunner(limits(1024, budget=budget, context=2048)), inter_token_slo_ms=slo_ms)
    for i in range(4):
        driver.add(ids(i, 20), 400)
    for _ in range(60):
        driver.step()
    before = len(driver.runner.steps)
    driver.add(ids(50, 1900), 1)
    for i in range(30):
        driver.step()
        driver.add(ids(60 + i, 500), 1)
    driver.run()
    return driver, driver.runner.steps[before:]


def test_every_step_has_every_running_decode_and_the_long_prompt_moves_in_each() -> None:
    driver, steps = long_prefill(slo_ms=200)
    until_done = next(i for i, step in enumerate(steps) if any(row.request == 4 and row.draw for row in step.rows))
    for step in steps[: until_done + 1]:
        assert {0, 1, 2, 3} <= {row.request for row in step.rows}
        assert [row.request for row in step.rows][:4] == [0, 1, 2, 3]
        assert any(row.request == 4 and len(row.tokens) >= 1 for row in step.rows)
    assert all(len(driver.text(attempt)) == 400 for attempt in range(1, 5))


def test_a_hopeless_slo_still_lets_one_block_through() -> None:
    driver = Driver(PagedRunner(limits()), inter_token_slo_ms=0.001)
    driver.add(ids(1, 20), 100)
    driver.step()
    driver.add(ids(2, 160), 1)
    driver.run()
    chunks = [len(row.tokens) for step in driver.runner.steps[1:] for row in step.rows if row.request == 1]
    assert chunks == [16] * 10


def test_without_decodes_the_slo_does_not_cut() -> None:
    driver = Driver(PagedRunner(limits(budget=256)), inter_token_slo_ms=0.001)
    driver.add(ids(1, 512), 1)
    assert driver.run() == 2


def test_chunks_end_with_a_block_and_long_ones_obey_their_threshold() -> None:
    driver = Driver(PagedRunner(limits(budget=100)), long_prefill_token_threshold=50)
    driver.add(ids(1, 200), 1)
    driver.run()
    assert [len(step.rows[0].tokens) for step in driver.runner.steps] == [48, 48, 48, 48, 8]


@pytest.mark.parametrize("budget", [1, 3, 16, 17])
def test_tiny_budgets_work(budget: int) -> None:
    driver = Driver(PagedRunner(limits(budget=budget)))
    attempts = [driver.add(ids(i, 40), 10) for i in range(4)]
    driver.run()
    assert all(len(driver.text(attempt)) == 10 for attempt in attempts)


def test_partial_prefills_are_limited() -> None:
    driver = Driver(PagedRunner(limits(budget=256)), long_prefill_token_threshold=32, max_num_partial_prefills=2)
    for i in range(6):
        driver.add(ids(i, 200), 1)
    while driver.engine.has_work:
        driver.step()
        assert sum(1 for request in driver.engine.roster.running if request.computed < len(request.tokens)) <= 2


def test_short_prompts_are_not_held_up_by_a_long_one() -> None:
    driver = Driver(PagedRunner(limits(budget=256)))
    driver.add(ids(1, 3000), 1)
    driver.step()
    short = [driver.add(ids(10 + i, 40), 1) for i in range(3)]
    driver.step()
    assert [len(driver.text(attempt)) for attempt in short] == [1, 1, 1]
    assert len(next(row for row in driver.runner.steps[-1].rows if row.request == 0).tokens) == 128
    driver.run()


SLOW = StepTimeCoefficients(a=5e-3, b=6e-4, c=5e-3, d=0.0)


def steps_of_the_long_prompt(decodes: int, short: int, budget: int = 512, steps_max: int = 200) -> int:
    """Steps until a prompt of 900 has its first token beside `decodes` at 5 ms, an SLO of 200 ms and a new prompt of `short` each step."""
    driver = Driver(PagedRunner(limits(40_000, seqs=64, budget=budget)), check=False, enable_prefix_caching=False)
    driver.runner.on_step = lambda step: setattr(driver, "now_s", driver.now_s + modelled_step_s(SLOW, step))
    driver.engine.step_time = StepTimeFit(SLOW, typical=0.0)
    for i in range(decodes):
        driver.add(ids(100 + i, 16), 4000)
    while any(request.remaining > 1 for request in driver.engine.roster.running) or driver.engine.roster.waiting:
        driver.step()
    long = driver.add(ids(7, 900), 4)
    for count in range(1, steps_max):
        driver.step()
        if (0, long) in driver.heard:
            return count
        if short:
            driver.add(ids(1000 + count, short), 1)
    return steps_max


def full_steps_over_the_slo(noise: float) -> float:
    """Part of the steps that prefill beside 10 decodes and take longer than the SLO of 200 ms: 1,500 prompts' tokens and noise."""
    driver = Driver(PagedRunner(limits(40_000, seqs=64, budget=512)), check=False, enable_prefix_caching=False)
    draw, took = random.Random(3), list[float]()

    def pass_time(step: Step) -> None:
        took.append(modelled_step_s(SLOW, step) * draw.gauss(1.0, noise))
        driver.now_s += took[-1]

    driver.runner.on_step = pass_time
    for i in range(10):
        driver.add(ids(100 + i, 16), 4000)
    for _ in range(100):
        driver.step()
    seen = len(took)
    for i in range(40):
        driver.add(ids(200 + i, 2_000), 1)
    while len(driver.engine.roster.running) + len(driver.engine.roster.waiting) > 12:
        driver.step()
    full = took[seen:]
    assert len(full) > 200
    return sum(one > 0.2 for one in full) / len(full)


def test_full_chunks_keep_the_slo_but_for_one_in_ten() -> None:
    assert full_steps_over_the_slo(0.1) <= 0.1


def test_chunks_planned_by_the_middle_break_it_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr("replica.step_time_fit._SPREAD", 0.0)
    assert full_steps_over_the_slo(0.1) > 0.35


@pytest.mark.parametrize(
    ("decodes", "short", "budget", "alone", "beside"),
    [
        (40, 16, 512, 57, 57),  # decodes take all of the SLO: a block a step is left, and no short prompt starts
        (38, 4, 512, 57, 57),  # 8 tokens are left: 4 for a short one, and the block all the same
        (30, 32, 512, 14, 27),  # 75: four blocks, or two beside 32 tokens
        (4, 6, 20, 57, 111),  # 16 tokens of a step that may have 20, or 10 and 6
    ],
)
def test_short_prompts_at_most_halve_a_long_one(decodes: int, short: int, budget: int, alone: int, beside: int) -> None:
    assert (steps_of_the_long_prompt(decodes, 0, budget), steps_of_the_long_prompt(decodes, short, budget)) == (alone, beside)


def test_without_its_half_a_long_prompt_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkBudget, "half", lambda budget, start: budget)
    assert steps_of_the_long_prompt(40, 16) == 200


def scored(steps_max: int = 60) -> bool:
    """Is a prompt of 40 scored within `steps_max` steps, in blocks of one token beside a decode that breaks the SLO?"""
    driver = Driver(PagedRunner(limits(4000, block=1)), inter_token_slo_ms=0.001)
    driver.add(ids(1, 1), 1000)
    driver.step()
    attempt = driver.add(ids(2, 40), 2, prompt_logprobs=1)
    for _ in range(steps_max):
        driver.step()
    return (0, attempt) in driver.heard and driver.finish(attempt) is FinishReason.LENGTH


def test_prompt_scores_come_beside_a_decode_in_blocks_of_one_token() -> None:
    assert scored()


def test_a_chunk_that_does_not_judge_the_token_after_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def up_to_its_end(*parts: Any) -> Row:
        return msgspec.structs.replace(chunk_row(*parts), score_next=None)

    monkeypatch.setattr(chunks, "chunk_row", up_to_its_end)
    with pytest.raises(AssertionError, match="the logits before are not in this row"):
        scored()


# --- skip-ahead and its bound (SCH-06; with its trace: test_case_traces) ---


def test_small_requests_pass_a_head_that_does_not_fit_and_the_head_is_not_starved() -> None:
    driver = Driver(PagedRunner(limits(160, budget=2048)))
    driver.add(ids(1, 900), 60)
    driver.step()  # 99 or so blocks stay free
    head = driver.add(ids(2, 2400), 1)
    small = [driver.add(ids(10 + i, 64), 4) for i in range(4)]
    driver.step()
    assert all(started(driver, attempt) == 2 for attempt in small)
    driver.run()
    assert started(driver, head) <= 65


def test_nobody_is_passed_more_than_the_bound() -> None:
    driver = Driver(PagedRunner(limits(160, budget=2048)))
    driver.add(ids(1, 1500), 400)
    driver.step()
    head = driver.add(ids(2, 2400), 1)
    for i in range(3 * BYPASSES_MAX):
        driver.add(ids(10 + i, 30), 2)
        driver.step()
    request = driver.engine.ledger.find(0, head)
    assert request is not None and request.history.bypasses == BYPASSES_MAX
    driver.run()


def test_whoever_is_passed_for_the_last_time_is_passed_no_more_in_that_step() -> None:
    """Two short prompts beside a long one that is partly computed: the first makes the bound full, so the second waits."""
    driver = Driver(PagedRunner(limits(1024, budget=256)), max_num_partial_prefills=1)
    driver.add(ids(1, 3000), 1)
    driver.step()
    head = driver.add(ids(2, 2400), 1)
    request = driver.engine.ledger.find(0, head)
    assert request is not None
    request.history.bypasses = BYPASSES_MAX - 1
    for i in range(2):
        driver.add(ids(10 + i, 20), 1)
    driver.step()
    assert [row.request for row in driver.runner.steps[-1].rows] == [2, 0] and request.history.bypasses == BYPASSES_MAX
    driver.run()


# --- sizes (SCH-08) and determinism --------------------------------------------------------------------------------------


def test_bursts_never_exceed_slots_or_budget() -> None:
    """PagedRunner asserts both in every step."""
    driver = Driver(PagedRunner(limits(seqs=4)))
    for burst in range(10):
        for i in range(4):
            driver.add(ids(burst * 4 + i, 30), 20)
        driver.step()
    driver.run()
    assert max(len(step.rows) for step in driver.runner.steps) == 4


def test_the_same_calls_give_the_same_steps() -> None:
    def trace() -> list[Step]:
        driver = Driver(PagedRunner(limits(60, seqs=8)))
        for i in range(20):
            driver.add(ids(i % 7, 40 + i), 60)
            driver.step()
        driver.run()
        return driver.runner.steps

    first, second = trace(), trace()
    assert [[(row.request, row.start, list(row.tokens)) for row in step.rows] for step in first] == [
        [(row.request, row.start, list(row.tokens)) for row in step.rows] for step in second
    ]


def test_shape_predicts_by_the_shared_model() -> None:
    shape = Shape(prefill_tokens=100, decodes=10, context_tokens=5000, prefill_context=0)
    assert shape.predict_s(COST) == pytest.approx(8e-3 + 100 * 5e-5 + 10 * 2e-5 + 5000 * 4e-8)
