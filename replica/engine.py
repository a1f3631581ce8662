"""One engine: requests in, tokens out, a step at a time. Synchronous, used from one thread.

    while engine.has_work:            or, to let cancels in while a step runs:
        output = engine.step()            step = engine.plan()
                                          wait = runner.begin(step)
                                          engine.plan_ahead()  # or not
                                          output = engine.settle(step, wait())

Nothing that a request brings can end the engine: what is wrong with it is refused at `submit`; a row's error ends that
request; a step that raises is taken apart, its requests run alone, and who fails alone ends with an error. Only
RunnerLost, which says that no step will work again, is passed on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from replica.config import EngineConfig
from replica.contract.messages import Bounce, BounceReason, EngineLimits, GenerateRequest, KvEvent, LoadReport, TokenDelta
from replica.departures import Departures
from replica.expectation import can_be_expected, expect, expect_nothing
from replica.intake import Intake, MaskOf
from replica.kv_manager import KvManager
from replica.ledger import Ledger
from replica.load import load_report
from replica.outbox import Outbox
from replica.plan import Plan
from replica.roster import Roster
from replica.scheduler import Scheduler
from replica.scheduling_policy import SchedulingPolicy
from replica.settling import failure_of, settle, take_apart
from replica.step import Runner, RunnerLost, Step, StepResult
from replica.step_time_fit import StepTimeFit


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What one step brought, or what there was to tell without one (then `rows` is 0)."""

    deltas: tuple[tuple[int, TokenDelta], ...]  # (owner, delta)
    events: tuple[KvEvent, ...]
    rows: int = 0
    tokens: int = 0  # computed in this step
    duration_s: float = 0.0
    error: str = ""  # the step raised this; its requests are being run alone


class Engine:
    """`clock` is monotonic, in seconds. `kv_block_bytes` only feeds load reports. `step_time`: what is known of this runner already.
    `mask_of` says which tokens a request may draw, where that is a matter of more than its sampling parameters."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        model_name: str,
        revision: str,
        clock: Callable[[], float],
        kv_block_bytes: int = 0,
        *,
        step_time: StepTimeFit | None = None,
        mask_of: MaskOf | None = None,
    ) -> None:
        self._runner = runner
        self._limits = msgspec.structs.replace(runner.limits, step_slo_s=config.inter_token_slo_ms / 1000)
        self._clock = clock
        self._kv_block_bytes = kv_block_bytes
        policy = self._policy = SchedulingPolicy.of(config)
        kv = KvManager(num_blocks=self._limits.num_blocks, block_size=self._limits.block_size, caching=config.enable_prefix_caching)
        self.roster = Roster(kv, policy, min(self._limits.max_num_seqs, self._limits.max_num_batched_tokens))
        self._scheduler = Scheduler(self.roster, policy, self._limits.max_num_batched_tokens)
        self.ledger = Ledger()
        self.step_time = step_time or StepTimeFit()
        self._outbox = Outbox()
        self._intake = Intake(self._limits, policy, model_name, revision, runner.eos_token_ids, mask_of)
        self._departures = Departures(self.roster, self.ledger, self._outbox)
        self._current: tuple[Plan, float] | None = None  # the step that runs, and when it began
        self._expected = False  # the next one has been planned already
        self._always_ahead = bool(config.async_scheduling)
        self._progress = 0

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def has_work(self) -> bool:
        """A request has not ended, or something is still to be told."""
        return len(self.ledger) > 0 or len(self._outbox) > 0

    # --- requests in ------------------------------------------------------------------------------------------------

    def submit(self, owner: int, request: GenerateRequest, arrived_s: float | None = None) -> Bounce | None:
        """Accept `request` (None), or say why not; a bounced request leaves no trace. It came at `arrived_s`, if not now."""
        waiting = len(self.roster.waiting)
        if self.ledger.find(owner, request.attempt) is not None:
            return Bounce(request.attempt, BounceReason.BAD_REQUEST, f"attempt {request.attempt} is already here")
        came_s = self._clock() if arrived_s is None else arrived_s
        taken = self._intake.take(owner, request, number=self.ledger.accepted, waiting=waiting, now_s=came_s)
        if isinstance(taken, Bounce):
            return taken
        self.ledger.open(taken)
        self.roster.add(taken)
        self._departures.watch(taken)
        return None

    def cancel(self, owner: int, attempt: int) -> None:
        """End an attempt, in whatever state it is; an unknown one is none of our business. Takes effect after the running step."""
        request = self.ledger.find(owner, attempt)
        if request is not None:
            self._departures.cancel(request, defer=self._current is not None)

    def cancel_owner(self, owner: int) -> None:
        """A connection is gone: end all that came by it."""
        for request in self.ledger.of_owner(owner):
            self._departures.cancel(request, defer=self._current is not None)

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self) -> EngineOutput | None:
        """Plan, execute, settle. None when nothing ran and there is nothing to tell."""
        step = self.plan()
        if step is None:
            return self.flush()
        if self._always_ahead:
            self.plan_ahead()
        try:
            result = self._runner.execute(step)
        except RunnerLost:
            raise
        except Exception as error:  # whatever the model code raises must not end the engine
            return self.settle(step, error)
        return self.settle(step, result)

    def plan(self) -> Step | None:
        """Decide the next step. None when nothing can run; then `flush` tells what ended meanwhile."""
        assert self._current is None, "the step before is not settled"
        now = self._clock()
        self._departures.expire(now)
        plan = self._scheduler.plan(self.step_time.cautious)
        if plan is None:
            return None
        for request in plan.requests[plan.shape.decodes :]:
            if request.history.first_scheduled_s is None:
                request.history.first_scheduled_s = now
                request.history.cached_tokens = min(request.computed, request.terms.prompt_length)
        self._current = (plan, self._clock())
        return plan.step

    def plan_ahead(self) -> None:
        """While a step runs: plan the next one as far as it can be foreseen; `plan` will correct it. Never needed, and idempotent."""
        assert self._current is not None, "no step runs"
        plan = self._current[0]
        if not self._expected and can_be_expected(plan) and self._scheduler.can_plan_ahead():
            expect(plan)
            self._expected = True
            self._scheduler.plan_ahead(self.step_time.cautious)

    def settle(self, step: Step, result: StepResult | Exception) -> EngineOutput:
        """Take in what the planned step brought, or that it raised."""
        assert self._current is not None and self._current[0].step is step, "this step was not planned last"
        plan, began_s = self._current
        expected, self._expected = self._expected, False
        self._current = None
        duration_s = self._clock() - began_s
        self._progress += 1
        self._departures.drain_cancels()
        error = failure_of(plan, result)
        if isinstance(result, StepResult) and not error:
            settle(plan, result, self.roster.kv, self._departures, vocab_size=self._limits.vocab_size, expected=expected)
            self.step_time.observe(plan.shape, duration_s)
        else:
            if expected:
                expect_nothing(plan)
            take_apart(plan, error, self.roster, self._departures)
        self.roster.kv.end_step()
        tokens = plan.shape.decodes + plan.shape.prefill_tokens
        return self._output(rows=len(step.rows), tokens=tokens, duration_s=duration_s, error=error)

    def flush(self) -> EngineOutput | None:
        """What there is to tell without a step: aborts, time-outs, evictions. None if nothing."""
        output = self._output()
        return output if output.deltas or output.events else None

    # --- reports ----------------------------------------------------------------------------------------------------

    def load(self, draining: bool = False) -> LoadReport:
        """Legal at any time, during a step too."""
        return load_report(
            self.roster,
            progress=self._progress,
            step_time=self.step_time,
            policy=self._policy,
            limits=self._limits,
            current=None if self._current is None else self._current[0],
            draining=draining,
            block_bytes=self._kv_block_bytes,
        )

    @property
    def predicted_step_s(self) -> float:
        """Of the step that runs; 0 between steps."""
        return 0.0 if self._current is None else self._current[0].shape.predict_s(self.step_time.coefficients)

    def snapshot(self) -> tuple[tuple[bytes, bytes], ...]:
        """All findable blocks as (key, parent), parents first; agrees with the events handed out when no step runs."""
        return self.roster.kv.pool.snapshot()

    def check(self) -> None:
        """Every invariant, from scratch. Between steps only."""
        self.ledger.check()
        self.roster.check(self.ledger.requests())

    # --- inside -----------------------------------------------------------------------------------------------------

    def _output(self, *, rows: int = 0, tokens: int = 0, duration_s: float = 0.0, error: str = "") -> EngineOutput:
        events = self.roster.kv.pool.events.take()
        return EngineOutput(self._outbox.take(), events, rows=rows, tokens=tokens, duration_s=duration_s, error=error)
