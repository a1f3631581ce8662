"""The engine from outside: what goes in comes out, whatever goes wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from core_harness import EOS, VOCAB, Driver, PagedRunner, ids, limits

from replica import departures, engine
from replica.contract.messages import BounceReason, FinishReason, GenerateRequest, SamplingParams
from replica.departures import Departures
from replica.growth import GrowthEstimate
from replica.request import LEGAL_MOVES, IllegalMove, Request, State
from replica.scheduling_policy import BYPASSES_MAX
from replica.step import Outcome, RunnerLost, Step, StepResult


def message(attempt: int = 1, prompt: tuple[int, ...] = (5, 6, 7), **changes: object) -> GenerateRequest:
    fields = {name: changes.pop(name) for name in ("choice", "block_keys", "emitted_ids", "deadline_s", "adapter") if name in changes}
    sampling = SamplingParams(**{"seed": 1, "max_tokens": 4, "ignore_eos": True, **changes})  # type: ignore[arg-type]
    return GenerateRequest(attempt, "x", prompt_ids=prompt, sampling=sampling, **{"choice": 0, "block_keys": (), **fields})  # type: ignore[arg-type]


# --- what the wire may bring ---------------------------------------------------------------------------------------------

BAD: list[dict[str, object]] = [
    {"prompt": ()},
    {"prompt": (VOCAB,)},
    {"prompt": (-1,)},
    {"emitted_ids": (VOCAB,)},
    {"block_keys": (b"short",)},
    {"choice": -1},
    {"adapter": "\ud800"},
    {"deadline_s": math.nan},
    {"temperature": -0.1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"top_p": math.nan},
    {"top_k": -1},
    {"min_p": 1.5},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": math.inf},
    {"presence_penalty": math.nan},
    {"frequency_penalty": math.inf},
    {"max_tokens": -1},
    {"max_tokens": 2**31},
    {"min_tokens": -1},
    {"seed": 2**64},
    {"logprobs": -1},
    {"logprobs": 5000},
    {"prompt_logprobs": 5000},
    {"prompt": (5,) * 4000, "prompt_logprobs": 1000},
    {"logit_bias": ((VOCAB, 1.0),)},
    {"logit_bias": ((1, math.nan),)},
    {"logit_bias": ((1, 1e300),)},
    {"stop_token_ids": (VOCAB,)},
    {"bad_words": ((),)},
    {"bad_words": ((VOCAB,),)},
    {"allowed_token_ids": ()},
    {"allowed_token_ids": (-1,)},
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: "-".join(f"{k}={v}"[:40] for k, v in bad.items()))
def test_bad_requests_bounce_and_leave_no_trace(bad: dict[str, object]) -> None:
    driver = Driver(PagedRunner(limits()))
    bounce = driver.engine.submit(0, message(**bad))  # type: ignore[arg-type]
    assert bounce is not None and bounce.reason is BounceReason.BAD_REQUEST and bounce.message
    assert not driver.engine.has_work and driver.engine.ledger.accepted == 0
    attempt = driver.add(ids(1, 5), 2)
    driver.run()
    assert len(driver.text(attempt)) == 2


def test_an_attempt_may_be_open_once_per_owner() -> None:
    driver = Driver(PagedRunner(limits()))
    assert driver.engine.submit(1, message(7)) is None
    again = driver.engine.submit(1, message(7))
    assert again is not None and again.reason is BounceReason.BAD_REQUEST
    assert driver.engine.submit(2, message(7, prompt=(9, 9))) is None
    driver.run()
    assert len(driver.text(7, owner=1)) == len(driver.text(7, owner=2)) == 4
    assert driver.engine.submit(1, message(7)) is None  # it has ended: the number is free


# --- how requests end ----------------------------------------------------------------------------------------------------


def test_the_first_delta_tells_what_admission_learns_from_and_the_last_the_end() -> None:
    driver = Driver(PagedRunner(limits(seqs=1)))
    first = driver.add(ids(1, 20), 3)
    second = driver.add(ids(2, 20), 3)
    driver.run()
    deltas = driver.heard[(0, second)].deltas
    assert [len(delta.token_ids) for delta in deltas] == [1, 1, 1]
    assert deltas[0].waited_s is not None and deltas[0].waited_s == pytest.approx(driver.now_s / 2, rel=0.1)
    assert deltas[0].cached_tokens == 0 and deltas[1].cached_tokens is None and deltas[1].waited_s is None
    assert [delta.finish for delta in deltas] == [None, None, FinishReason.LENGTH]
    assert driver.heard[(0, first)].deltas[0].waited_s == 0


@pytest.mark.parametrize(
    ("changes", "length", "finish"),
    [
        ({"ignore_eos": False}, 6, FinishReason.STOP),
        ({"ignore_eos": True}, 20, FinishReason.LENGTH),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, 6, FinishReason.STOP),
        ({"ignore_eos": False, "min_tokens": 6}, 6, FinishReason.STOP),
        ({"ignore_eos": False, "min_tokens": 7}, 20, FinishReason.LENGTH),
        ({"ignore_eos": False, "max_tokens": 6}, 6, FinishReason.STOP),
        ({"ignore_eos": False, "max_tokens": 5}, 5, FinishReason.LENGTH),
    ],
)
def test_end_tokens_and_limits(changes: dict[str, object], length: int, finish: FinishReason) -> None:
    driver = Driver(PagedRunner(limits()))
    driver.runner.stop_at[1] = 5  # the sixth token drawn is the end token
    attempt = driver.add(ids(1, 20), **{"max_tokens": 20, **changes})  # type: ignore[arg-type]
    driver.run()
    assert len(driver.text(attempt)) == length and driver.finish(attempt) is finish
    last = driver.heard[(0, attempt)].deltas[-1]
    assert last.stop_id == (EOS if finish is FinishReason.STOP else None)


def test_max_tokens_zero_computes_the_prompt_and_ends_without_a_token() -> None:
    driver = Driver(PagedRunner(limits(budget=16)))
    attempt = driver.add(ids(1, 40), 0)
    assert driver.run() == 3
    (delta,) = driver.heard[(0, attempt)].deltas
    assert delta.token_ids == () and delta.finish is FinishReason.LENGTH and delta.cached_tokens == 0
    assert all(row.draw is None for step in driver.runner.steps for row in step.rows)


@pytest.mark.parametrize(("budget", "max_tokens"), [(256, 0), (16, 0), (7, 3), (2, 1)])
def test_prompt_logprobs_cover_every_position_once_in_any_chunking(budget: int, max_tokens: int) -> None:
    reference = Driver(PagedRunner(limits()))
    whole = reference.add(ids(1, 40), max_tokens, prompt_logprobs=2, seed=1)
    reference.run()
    driver = Driver(PagedRunner(limits(budget=budget)))
    driver.add(ids(1, 40), 1)  # the prompt is cached: no excuse for not scoring it
    driver.run()
    attempt = driver.add(ids(1, 40), max_tokens, prompt_logprobs=2, seed=1)
    driver.run()
    scores = driver.heard[(0, attempt)].deltas[0].prompt_logprobs
    assert len(scores) == 40 and scores[0] is None
    assert [score.token_id for score in scores if score is not None] == ids(1, 40)[1:]
    assert all(score is None or len(score.top) == 2 for score in scores)
    assert scores == reference.heard[(0, whole)].deltas[0].prompt_logprobs
    assert driver.cached(attempt) == 0 and len(driver.text(attempt)) == max_tokens
    assert all(not delta.prompt_logprobs for delta in driver.heard[(0, attempt)].deltas[1:])


def test_scores_survive_a_preemption_in_the_middle_of_the_prompt() -> None:
    driver = Driver(PagedRunner(limits(budget=16)))
    attempt = driver.add(ids(1, 100), 3, prompt_logprobs=0)
    calm = Driver(PagedRunner(limits()))
    other = calm.add(ids(1, 100), 3, prompt_logprobs=0)
    calm.run()
    for count in range(400):
        if not driver.engine.has_work:
            break
        driver.step()
        if count in (2, 3, 9, 25):
            for request in list(driver.engine.roster.running):
                driver.engine.roster.preempt(request)
    assert driver.heard[(0, attempt)].deltas[0].prompt_logprobs == calm.heard[(0, other)].deltas[0].prompt_logprobs
    assert driver.text(attempt) == calm.text(other)


def test_what_an_earlier_attempt_emitted_counts_as_output() -> None:
    whole = Driver(PagedRunner(limits()))
    attempt = whole.add(ids(1, 37), 50, seed=5)
    whole.run()
    text = whole.text(attempt)
    for emitted in (1, 11, 27, 49):
        driver = Driver(PagedRunner(limits()))
        moved = driver.add(ids(1, 37), 50, seed=5, emitted=text[:emitted], prompt_logprobs=1)
        driver.run()
        assert driver.text(moved) == text[emitted:] and driver.finish(moved) is FinishReason.LENGTH
        assert not driver.heard[(0, moved)].deltas[0].prompt_logprobs  # delivered by the first attempt


def test_moved_requests_share_the_cache_of_prompt_and_output() -> None:
    driver = Driver(PagedRunner(limits()))
    first = driver.add(ids(1, 40), 30, seed=1)
    driver.run()
    moved = driver.add(ids(1, 40), 40, seed=1, emitted=driver.text(first))
    driver.run()
    assert driver.runner.steps[-10].rows[0].start == 64 and driver.cached(moved) == 40
    assert sum(len(row.tokens) for step in driver.runner.steps for row in step.rows if row.request == 1) == 70 - 64 + 9


@pytest.mark.parametrize(
    ("emitted", "finish"), [([5, 6, 7, 8], FinishReason.LENGTH), ([5, 6, 7, 8, 9], FinishReason.LENGTH), ([5, EOS], FinishReason.STOP)]
)
def test_a_moved_request_that_had_ended_ends_at_once(emitted: list[int], finish: FinishReason) -> None:
    driver = Driver(PagedRunner(limits()))
    attempt = driver.add(ids(1, 20), 4, emitted=emitted, ignore_eos=False)
    driver.take(driver.engine.flush())
    assert driver.finish(attempt) is finish and driver.text(attempt) == []
    assert not driver.engine.has_work and not driver.runner.steps


# --- deadlines -----------------------------------------------------------------------------------------------------------


def test_a_deadline_ends_who_waits_but_not_who_has_a_token() -> None:
    driver = Driver(PagedRunner(limits(seqs=1)))
    streaming = driver.add(ids(1, 20), 100, deadline_s=0.05)
    waiting = driver.add(ids(2, 20), 5, deadline_s=0.05)
    patient = driver.add(ids(3, 20), 5)
    moved = driver.add(ids(4, 20), 5, deadline_s=0.05, emitted=(5,))
    driver.run()
    assert driver.finish(waiting) is FinishReason.TIMEOUT and driver.text(waiting) == []
    assert driver.heard[(0, waiting)].deltas[0].waited_s is None
    assert len(driver.text(streaming)) == 100
    assert driver.finish(patient) is FinishReason.LENGTH and driver.finish(moved) is FinishReason.LENGTH


def test_a_deadline_ends_a_prefill_whose_first_token_would_come_too_late() -> None:
    driver = Driver(PagedRunner(limits(budget=16)))
    attempt = driver.add(ids(1, 1600), 5, deadline_s=0.05)
    driver.run()
    assert driver.finish(attempt) is FinishReason.TIMEOUT and len(driver.runner.steps) < 10


def test_deadlines_of_the_ended_are_forgotten() -> None:
    driver = Driver(PagedRunner(limits()))
    for i in range(300):
        driver.add(ids(i, 5), 1, deadline_s=1e9)
        driver.run()
    assert len(driver.engine._departures._deadlines) < 100, "each holds a whole request"


# --- cancels in every state (KVC-10, KVC-11) -----------------------------------------------------------------------------


def cancel_in(state: str) -> Driver:
    """One request cancelled in `state` while two others run."""
    driver = Driver(PagedRunner(limits(40, seqs=3, budget=64)), max_num_partial_prefills=1)
    engine = driver.engine
    others = [driver.add(ids(i, 20), 30) for i in (1, 2)]
    attempt = driver.add(ids(3, 150), 30)
    if state == "waiting":
        engine.cancel(0, attempt)
    elif state == "partly computed":
        driver.step()
        driver.step()
        request = engine.ledger.find(0, attempt)
        assert request is not None and 0 < request.computed < 150
        engine.cancel(0, attempt)
    elif state in ("planned", "executed"):
        for _ in range(5):
            driver.step()
        step = engine.plan()
        assert step is not None and any(row.request == 2 for row in step.rows)
        referenced = engine.roster.kv.pool.referenced
        if state == "planned":
            engine.cancel(0, attempt)
            engine.cancel(0, attempt)
        result = driver.runner.execute(step)
        if state == "executed":
            engine.cancel_owner(5)
            engine.cancel(0, attempt)
        assert engine.roster.kv.pool.referenced == referenced, "blocks left before the step ended"
        driver.take(engine.settle(step, result))
    elif state == "preempted":
        for _ in range(6):
            driver.step()
        request = engine.ledger.find(0, attempt)
        assert request is not None
        engine.roster.preempt(request)
        engine.cancel(0, attempt)
    elif state == "finished":
        driver.run()
        engine.cancel(0, attempt)
        engine.cancel(9, 12345)
        assert engine.flush() is None
    engine.check()
    steps = len(driver.runner.steps)
    driver.run()
    assert all(row.request != 2 for step in driver.runner.steps[steps:] for row in step.rows)
    assert all(len(driver.text(other)) == 30 for other in others)
    assert engine.roster.kv.pool.referenced == 0
    return driver


@pytest.mark.parametrize("state", ["waiting", "partly computed", "planned", "executed", "preempted", "finished"])
def test_cancel_is_legal_in_every_state_and_ends_once(state: str) -> None:
    driver = cancel_in(state)
    assert driver.finish(3) is (FinishReason.LENGTH if state == "finished" else FinishReason.ABORT)
    assert driver.engine.ledger.ended(FinishReason.ABORT) == (state != "finished")


def test_a_lost_connection_frees_all_its_blocks_at_once() -> None:
    driver = Driver(PagedRunner(limits(1024, context=2048)))
    for i in range(20):
        driver.add(ids(i, 50), 1900, owner=1)
    kept = driver.add(ids(99, 50), 20, owner=2)
    for _ in range(5):
        driver.step()
    step = driver.engine.plan()
    assert step is not None
    driver.engine.cancel_owner(1)
    driver.take(driver.engine.settle(step, driver.runner.execute(step)))
    load = driver.engine.load()
    assert load.running + load.waiting == 1
    driver.run()
    assert len(driver.text(kept, owner=2)) == 20 and driver.engine.load().running == 0


def test_release_during_a_step_would_be_noticed() -> None:
    """Negative control: a cancel that does not wait lets the pages be written by two."""
    driver = Driver(PagedRunner(limits(4, budget=64)))
    attempt = driver.add(ids(1, 40), 20)
    step = driver.engine.plan()
    assert step is not None
    request = driver.engine.ledger.find(0, attempt)
    assert request is not None
    driver.engine._departures.cancel(request, defer=False)
    assert driver.engine.roster.kv.pool.referenced == 0  # what the guard prevents
    driver.engine.settle(step, driver.runner.execute(step))


# --- failures ------------------------------------------------------------------------------------------------------------


def undisturbed(count: int, max_tokens: int = 12) -> Driver:
    driver = Driver(PagedRunner(limits(budget=64)))
    for i in range(count):
        driver.add(ids(i, 30), max_tokens)
    driver.run()
    return driver


@pytest.mark.parametrize("at_position", [0, 29, 35])
def test_who_makes_every_step_raise_ends_alone(at_position: int) -> None:
    runner = PagedRunner(limits(budget=64))
    driver = Driver(runner)
    driver.failures_expected = True

    def raises(step: Step) -> str:
        return "bad logits" if any(row.request == 2 and row.start + len(row.tokens) > at_position for row in step.rows) else ""

    runner.raise_for = raises
    for i in range(5):
        driver.add(ids(i, 30), 12)
    driver.run()
    calm = undisturbed(5)
    for attempt in (1, 2, 4, 5):
        assert driver.text(attempt) == calm.text(attempt) and driver.finish(attempt) is FinishReason.LENGTH
    assert driver.finish(3) is FinishReason.ERROR
    assert "bad logits" in driver.heard[(0, 3)].deltas[-1].error
    assert driver.text(3) == calm.text(3)[: len(driver.text(3))]


def test_a_passing_fault_costs_nobody_anything() -> None:
    runner = PagedRunner(limits(budget=64))
    driver = Driver(runner)
    driver.failures_expected = True
    runner.raise_for = lambda step: "hiccup" if step.step_id == 9 else ""
    for i in range(5):
        driver.add(ids(i, 30), 12)
    driver.run()
    calm = undisturbed(5)
    assert all(driver.text(attempt) == calm.text(attempt) for attempt in range(1, 6))
    after = [step for step in runner.steps if 9 < step.step_id < 14]
    assert all(len(step.rows) == 1 for step in after)


def test_a_runner_that_always_raises_ends_everyone_and_the_engine_goes_on() -> None:
    runner = PagedRunner(limits(40, budget=64, seqs=3))
    driver = Driver(runner)
    driver.failures_expected = True
    runner.raise_for = lambda step: "dead"
    attempts = [driver.add(ids(i, 100), 12) for i in range(8)]
    driver.run()
    assert all(driver.finish(attempt) is FinishReason.ERROR for attempt in attempts)
    assert driver.engine.roster.kv.pool.referenced == 0
    runner.raise_for = lambda step: ""
    last = driver.add(ids(1, 100), 12)
    driver.run()
    assert len(driver.text(last)) == 12


def test_a_suspect_may_be_cancelled_before_its_turn() -> None:
    runner = PagedRunner(limits(budget=64))
    driver = Driver(runner)
    driver.failures_expected = True
    runner.raise_for = lambda step: "x" if len(step.rows) > 1 else ""
    attempts = [driver.add(ids(i, 16), 3) for i in range(4)]
    driver.step()
    driver.engine.cancel(0, attempts[1])
    runner.raise_for = lambda step: ""
    driver.run()
    assert [driver.finish(attempt) for attempt in attempts] == [
        FinishReason.LENGTH,
        FinishReason.ABORT,
        FinishReason.LENGTH,
        FinishReason.LENGTH,
    ]


def test_a_rows_error_ends_that_request_alone() -> None:
    runner = PagedRunner(limits(budget=64))
    driver = Driver(runner)
    runner.error_for = lambda row: "grammar dead end" if row.request == 1 and row.start > 33 else ""
    for i in range(4):
        driver.add(ids(i, 30), 12)
    driver.run()
    calm = undisturbed(4)
    assert driver.finish(2) is FinishReason.ERROR and driver.heard[(0, 2)].deltas[-1].error == "grammar dead end"
    assert all(driver.text(attempt) == calm.text(attempt) for attempt in (1, 3, 4))


class Babbler(PagedRunner):
    """Answers with `token`, or to another step, or to fewer rows."""

    token: int | None = None
    forget_rows = False

    def execute(self, step: Step) -> StepResult:
        result = super().execute(step)
        if self.forget_rows:
            return StepResult(step.step_id, result.outcomes[:-1])
        outcomes = tuple(type(outcome)(token=self.token, scores=outcome.scores) for outcome in result.outcomes)
        return StepResult(step.step_id, outcomes)


@pytest.mark.parametrize("token", [None, -1, VOCAB])
def test_a_token_that_is_none_fails_its_request(token: int | None) -> None:
    runner = Babbler(limits())
    runner.token = token
    driver = Driver(runner)
    attempt = driver.add(ids(1, 20), 5)
    driver.run()
    assert driver.finish(attempt) is FinishReason.ERROR


def test_an_answer_that_does_not_fit_the_step_counts_for_nothing() -> None:
    runner = Babbler(limits())
    runner.forget_rows = True
    driver = Driver(runner)
    driver.failures_expected = True
    attempt = driver.add(ids(1, 20), 5)
    driver.run()
    assert driver.finish(attempt) is FinishReason.ERROR and driver.engine.snapshot() == ()


MALFORMED: dict[str, Callable[[StepResult], object]] = {
    "nothing": lambda result: None,
    "outcomes-alone": lambda result: result.outcomes,
    "no-outcomes": lambda result: StepResult(result.step_id, None),  # type: ignore[arg-type]
    "no-outcome": lambda result: StepResult(result.step_id, (*result.outcomes[:-1], None)),  # type: ignore[arg-type]
    "float": lambda result: StepResult(result.step_id, (*result.outcomes[:-1], Outcome(token=5.0))),  # type: ignore[arg-type]
    "text": lambda result: StepResult(result.step_id, (*result.outcomes[:-1], Outcome(token="x"))),  # type: ignore[arg-type]
}


class Malformer(PagedRunner):
    """Answers its third step with what is no answer."""

    malform: Callable[[StepResult], object]

    def execute(self, step: Step) -> StepResult:
        result = super().execute(step)
        return self.malform(result) if len(self.steps) == 3 else result  # type: ignore[return-value]


def malformed_once(kind: str, ahead: bool) -> tuple[list[str], list[list[int]]]:
    """Errors of the steps, and what three requests were told."""
    runner = Malformer(limits())
    runner.malform = MALFORMED[kind]
    driver = Driver(runner, async_scheduling=ahead)
    driver.failures_expected = True
    attempts = [driver.add(ids(i, 20), 5) for i in range(3)]
    driver.run()
    assert driver.engine.roster.kv.pool.referenced == 0
    return [output.error for output in driver.outputs if output.error], [driver.text(attempt) for attempt in attempts]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_answer_is_a_step_that_failed(kind: str, ahead: bool) -> None:
    """Nothing of it counts; what is run again has every token once."""
    undisturbed = Driver(PagedRunner(limits()))
    attempts = [undisturbed.add(ids(i, 20), 5) for i in range(3)]
    undisturbed.run()
    errors, texts = malformed_once(kind, ahead)
    assert len(errors) == 1 and "the runner answered" in errors[0]
    assert texts == [undisturbed.text(attempt) for attempt in attempts]


@pytest.mark.parametrize("kind", ["no-outcome", "text"])
def test_without_a_look_at_the_answer_it_ends_the_engine(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(engine, "failure_of", lambda plan, result: "")
    with pytest.raises((AttributeError, TypeError, AssertionError)):
        malformed_once(kind, ahead=False)


def ended_lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is learned of one that is cancelled after 3 tokens, one that had ended when it was moved, a moved one, and a whole one."""
    learned: list[int] = []
    monkeypatch.setattr(GrowthEstimate, "learn", lambda growth, tokens: learned.append(tokens))
    driver = Driver(PagedRunner(limits()))
    cancelled = driver.add(ids(1, 20), 50, ignore_eos=False)
    for _ in range(3):
        driver.step()
    driver.engine.cancel(0, cancelled)
    driver.add(ids(2, 20), 50, ignore_eos=False, emitted=(7, 8, EOS))
    driver.add(ids(3, 20), 6, emitted=(7, 8))
    driver.run()
    driver.add(ids(4, 20), 5)
    driver.run()
    return learned


def test_only_who_ends_by_itself_says_how_long_outputs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended_lengths(monkeypatch) == [6, 5]


def test_with_aborts_counted_outputs_seem_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "_BY_ITSELF", tuple(FinishReason))
    end = Departures.end

    def with_what_it_has(self: Departures, request: Request, reason: FinishReason, tokens: tuple[int, ...] = (), *rest: object) -> None:
        end(self, request, reason, tokens or tuple(request.output_ids), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Departures, "end", with_what_it_has)
    assert ended_lengths(monkeypatch) == [3, 3, 6, 5]


def test_a_lost_runner_is_passed_on() -> None:
    runner = PagedRunner(limits())
    driver = Driver(runner)

    def lose(step: Step) -> str:
        raise RunnerLost("rank 1 is gone")

    runner.raise_for = lose
    driver.add(ids(1, 20), 5)
    with pytest.raises(RunnerLost):
        driver.step()


# --- the table, and the books --------------------------------------------------------------------------------------------


def test_only_the_tables_moves_are_legal() -> None:
    driver = Driver(PagedRunner(limits()))
    attempt = driver.add(ids(1, 5), 1)
    request = driver.engine.ledger.find(0, attempt)
    assert request is not None
    for state in State:
        for target in State:
            request.state = state
            if target in LEGAL_MOVES[state]:
                request.move(target)
                assert request.state is target
            else:
                with pytest.raises(IllegalMove):
                    request.move(target)


def test_load_is_what_the_containers_hold() -> None:
    driver = Driver(PagedRunner(limits(64, seqs=2, budget=64)))
    idle = driver.engine.load()
    assert (idle.running, idle.waiting, idle.queued_prefill_tokens, idle.free_blocks, idle.evictable_blocks) == (0, 0, 0, 64, 0)
    driver.add(ids(1, 20), 10)
    driver.add(ids(2, 200), 10)
    driver.add(ids(3, 30), 10)
    driver.step()
    load = driver.engine.load(draining=True)
    assert (load.running, load.waiting, load.progress, load.draining) == (2, 1, 1, True)
    assert load.queued_prefill_tokens == (200 - 32) + 30
    assert load.short_prefill_tokens == 30, "half of a step holds it: it will pass the one of 200"
    assert load.busy_s == pytest.approx(driver.now_s) and load.foreseen_s > 0
    assert load.context_tokens == 20 + 32
    assert load.free_blocks == 64 - 2 - 13 and load.evictable_blocks == 0
    assert load.predicted_step_s > 0
    driver.run()
    assert driver.engine.load().free_blocks + driver.engine.load().evictable_blocks == 64
    assert driver.engine.limits.step_slo_s == pytest.approx(0.2)
    assert Driver(PagedRunner(limits(64)), batching="iteration").engine.load().short_prefill_tokens is None, "a baseline keeps the order"


def test_what_passes_longer_prompts_is_what_the_scheduler_lets_pass() -> None:
    def short(driver: Driver, tokens: int = 30, count: int = 1) -> int | None:
        driver.add(ids(1, 20), 10)
        driver.add(ids(2, 200), 10)
        for i in range(count):
            driver.add(ids(3 + i, tokens), 10)
        driver.step()
        return driver.engine.load().short_prefill_tokens

    small = limits(400, seqs=2, budget=64)
    assert short(Driver(PagedRunner(small))) == 30
    assert short(Driver(PagedRunner(small)), tokens=33) == 0, "half a step does not hold it"
    assert short(Driver(PagedRunner(small), long_prefill_token_threshold=16)) == 0, "a step holds no more of a prompt"
    assert short(Driver(PagedRunner(small), scheduling_policy="priority")) is None, "urgency has an order of its own"
    assert short(Driver(PagedRunner(small)), count=70) is None, "who stands behind 64 is not looked at"
    aged = Driver(PagedRunner(small))
    assert short(aged, tokens=100, count=2) == 0
    for request in aged.engine.roster.waiting:
        request.history.bypasses = BYPASSES_MAX
    assert aged.engine.load().short_prefill_tokens is None, "who has been passed too often lets nobody pass"


def test_a_request_has_waited_since_it_came() -> None:
    driver = Driver(PagedRunner(limits(64)))
    driver.now_s = 10.0
    message = GenerateRequest(1, "x", 0, tuple(ids(1, 20)), (), SamplingParams(seed=1, max_tokens=2, ignore_eos=True))
    assert driver.engine.submit(0, message, arrived_s=9.5) is None
    output = driver.engine.step()
    assert output is not None
    assert output.deltas[0][1].waited_s == pytest.approx(0.5), "a step ran"


def test_steps_have_sizes_and_times() -> None:
    driver = Driver(PagedRunner(limits(budget=64)))
    driver.add(ids(1, 100), 2)
    output = driver.step()
    assert output is not None and (output.rows, output.tokens) == (1, 64)
    assert output.duration_s == pytest.approx(8e-3 + 64 * 5e-5, rel=0.01)
    assert driver.engine.step() is not None
    driver.engine.step()
    assert driver.engine.step() is None and not driver.engine.has_work
