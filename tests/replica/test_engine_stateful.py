"""Any history of arrivals, cancels, lost connections, failing rows and steps, and forced preemptions, in tiny pools, under every policy.

After each step every invariant is checked from scratch (Driver does), something has moved, and nobody has been passed or
has stood back too often. At the end: exactly one outcome each, every text equal to the undisturbed one or a prefix of it,
nothing held, and whoever follows the KV events knows what is findable.

A quick profile by default; RANTANG_TRACES=long runs tens of thousands of steps.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from core_harness import Driver, PagedRunner, ids, limits
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replica.contract.messages import Cleared, FinishReason, GenerateRequest, Removed, SamplingParams, Stored
from replica.scheduling_policy import SHARED_WAITS_MAX
from replica.step import Row, Step

LONG = os.environ.get("RANTANG_TRACES") == "long"
BYPASSES_MAX = 4


@dataclass(frozen=True)
class Wish:
    """A request to be: whose, and of what kind."""

    owner: int
    attempt: int
    family: int  # requests of a family share what their lengths allow
    length: int
    max_tokens: int
    seed: int
    priority: int
    emitted: int
    deadline_s: float | None
    scores: int | None
    ignore_eos: bool


WISHES = st.builds(
    Wish,
    owner=st.integers(0, 1),
    attempt=st.integers(0, 9),
    family=st.integers(0, 2),
    length=st.integers(1, 90),
    max_tokens=st.integers(0, 40),
    seed=st.integers(0, 9),
    priority=st.integers(-1, 1),
    emitted=st.sampled_from((0, 0, 0, 5)),
    deadline_s=st.sampled_from((None, None, None, None, 0.02, 0.5)),
    scores=st.sampled_from((None, None, None, None, 1)),
    ignore_eos=st.booleans(),
)


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.known: set[bytes] = set()
        self.messages: dict[tuple[int, int], GenerateRequest] = {}
        self.seen_outputs = 0
        self.passes_forced = 0  # starts out of turn that failing steps and the hook have caused

    @initialize(
        block=st.sampled_from((1, 4, 16)),
        room=st.integers(80, 320),
        seqs=st.integers(1, 6),
        budget=st.integers(2, 70),
        policy=st.sampled_from(("fcfs", "priority")),
        caching=st.sampled_from((True, True, True, False)),
        batching=st.sampled_from(("adaptive", "adaptive", "iteration", "static")),
        chunked=st.sampled_from((True, True, False)),
        slo_ms=st.sampled_from((0.001, 9.0, 200.0)),
        threshold=st.sampled_from((0, 5)),
        poison=st.sampled_from((0, 0, 0, 7)),
        sanguine=st.booleans(),
        ahead=st.booleans(),
    )
    def start(
        self,
        block: int,
        room: int,
        seqs: int,
        budget: int,
        policy: str,
        caching: bool,
        batching: str,
        chunked: bool,
        slo_ms: float,
        threshold: int,
        poison: int,
        sanguine: bool,
        ahead: bool,
    ) -> None:
        self.limits = limits(room // block, block=block, seqs=seqs, budget=budget, waiting=12)
        self.poison = poison
        self.runner = PagedRunner(self.limits)
        if not chunked:
            self.runner.budget = budget + 150
        self.runner.raise_for = self.raises
        self.runner.error_for = lambda row: "no token" if self.ill_row(row) else ""
        self.fail_next = False
        self.driver = Driver(
            self.runner,
            scheduling_policy=policy,
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            batching=batching,
            inter_token_slo_ms=slo_ms,
            long_prefill_token_threshold=threshold,
            max_num_partial_prefills=2,
            async_scheduling=ahead,
        )
        self.ahead = ahead
        self.driver.failures_expected = True
        self.driver.engine.roster.waiting._bypasses_max = BYPASSES_MAX
        for _ in range(100 * sanguine):  # expects that everybody ends at once: starts more than the pool will hold
            self.driver.engine.roster.growth.learn(1)

    def ill_row(self, row: Row) -> bool:
        return row.draw is not None and row.draw.sampling.seed == 8 and len(row.draw.output_ids) == 6

    def raises(self, step: Step) -> str:
        if self.fail_next:
            self.fail_next = False
            return "a passing fault"
        if self.poison and any(row.draw is not None and row.draw.sampling.seed == self.poison for row in step.rows):
            return "poison"
        return ""

    @rule(wishes=st.lists(WISHES, min_size=1, max_size=5))
    def add(self, wishes: list[Wish]) -> None:
        for wish in wishes:
            self.submit(wish)

    def submit(self, wish: Wish) -> None:
        owner, attempt, length = wish.owner, wish.attempt, wish.length
        engine = self.driver.engine
        message = GenerateRequest(
            attempt=attempt,
            request_id="x",
            choice=0,
            prompt_ids=tuple(ids(wish.family, length)),
            block_keys=(),
            sampling=SamplingParams(seed=wish.seed, max_tokens=wish.max_tokens, ignore_eos=wish.ignore_eos, prompt_logprobs=wish.scores),
            emitted_ids=tuple(undisturbed(wish.family, length, wish.seed, wish.emitted)) if wish.max_tokens > wish.emitted else (),
            priority=wish.priority,
            deadline_s=wish.deadline_s,
        )
        is_open = engine.ledger.find(owner, attempt) is not None
        waiting = len(engine.roster.waiting)
        self.driver.take(engine.flush())
        if not is_open:
            self.driver.heard.pop((owner, attempt), None)
        bounce = engine.submit(owner, message)
        capacity = self.limits.num_blocks * self.limits.block_size
        must_bounce = is_open or waiting >= 12 or length + 1 > capacity or length + len(message.emitted_ids) > capacity
        assert (bounce is not None) == must_bounce
        if bounce is None:
            self.messages[(owner, attempt)] = message
        elif not is_open:
            self.messages.pop((owner, attempt), None)

    @rule(owner=st.integers(0, 1), attempt=st.integers(0, 9))
    def cancel(self, owner: int, attempt: int) -> None:
        self.driver.engine.cancel(owner, attempt)
        self.driver.take(self.driver.engine.flush())

    @rule(owner=st.integers(0, 1))
    def lose_connection(self, owner: int) -> None:
        self.driver.engine.cancel_owner(owner)

    @precondition(lambda self: hasattr(self, "driver"))
    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            worked = self.driver.engine.has_work
            assert (self.driver.step() is not None) >= worked, "work is left, but nothing runs"

    @rule()
    def failing_step(self) -> None:
        self.passes_forced += len(self.driver.engine.roster.running)
        self.fail_next = True
        self.driver.step()
        self.fail_next = False

    @rule(owner=st.integers(0, 1), attempt=st.integers(0, 9), fails=st.booleans())
    def cancel_during_a_step(self, owner: int, attempt: int, fails: bool) -> None:
        engine = self.driver.engine
        step = engine.plan()
        if step is None:
            self.driver.take(engine.flush())
            return
        self.fail_next = fails
        self.passes_forced += fails * len(step.rows)
        engine.cancel(owner, attempt)
        if self.ahead:
            engine.plan_ahead()
        try:
            self.driver.take(engine.settle(step, self.runner.execute(step)))
        except RuntimeError as error:
            self.driver.take(engine.settle(step, error))
        self.fail_next = False

    @rule(which=st.integers(0, 5))
    def force_preemption(self, which: int) -> None:
        running = self.driver.engine.roster.running
        if running:
            self.driver.engine.roster.preempt(running[which % len(running)])
            self.passes_forced += 1

    @invariant()
    def waiting_is_bounded(self) -> None:
        """Who is passed, is so by the bound, and by those that a failing step or the hook has put out of turn."""
        if not hasattr(self, "driver"):
            return
        allowed = BYPASSES_MAX + self.limits.max_num_seqs + self.passes_forced + (1_000_000 if self.poison else 0)
        for request in self.driver.engine.ledger.requests():
            assert request.history.bypasses <= allowed
            assert request.history.shared_waits <= SHARED_WAITS_MAX

    @invariant()
    def books_and_events_agree(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.engine.check()
        for output in self.driver.outputs[self.seen_outputs :]:
            for event in output.events:
                if isinstance(event, Cleared):
                    self.known.clear()
                elif isinstance(event, Stored):
                    assert not self.known & set(event.keys)
                    self.known |= set(event.keys)
                elif isinstance(event, Removed):
                    assert set(event.keys) <= self.known
                    self.known -= set(event.keys)
        self.seen_outputs = len(self.driver.outputs)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        engine = self.driver.engine
        self.driver.run(5_000)
        self.books_and_events_agree()
        assert self.known == {key for key, _ in engine.snapshot()}
        assert engine.roster.kv.pool.referenced == 0
        assert engine.ledger.accepted == sum(engine.ledger.ended(reason) for reason in FinishReason)
        for (owner, attempt), message in self.messages.items():
            heard = self.driver.heard[(owner, attempt)]
            assert heard.finish is not None
            text = [*message.emitted_ids, *heard.token_ids]
            family = next(f for f in range(3) if ids(f, len(message.prompt_ids)) == list(message.prompt_ids))
            limit = min(message.sampling.max_tokens, self.limits.num_blocks * self.limits.block_size - len(message.prompt_ids))
            expected = undisturbed(family, len(message.prompt_ids), message.sampling.seed, max(limit, len(message.emitted_ids)))
            assert text == expected[: len(text)]
            if heard.finish is FinishReason.LENGTH:
                assert len(text) == len(expected)


_texts: dict[tuple[int, int, int], list[int]] = {}


def undisturbed(family: int, length: int, seed: int, count: int) -> list[int]:
    """The first `count` tokens of the text in a pool where nothing ever happens."""
    key = (family, length, seed)
    if key not in _texts:
        driver = Driver(PagedRunner(limits(64)), check=False)
        attempt = driver.add(ids(family, length), 45, seed=seed)
        driver.run()
        _texts[key] = driver.text(attempt)
    return _texts[key][:count]


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=300 if LONG else 40,
    stateful_step_count=100 if LONG else 40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
