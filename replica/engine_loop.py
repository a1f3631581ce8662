"""The engine's own thread: takes what arrived, runs steps while there is work, sleeps otherwise, reports every step.

One thread touches the engine, ever. The event loop's thread talks to it through the Inbox and hears of it through
`deliver`, called on the event loop. Cancels are taken twice a step: before planning, and between the forward pass and
the settling of its result, so that a cancelled request costs at most the step that was running and one more.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog

from replica.contract.messages import Bounce, BounceReason, GenerateRequest, KvEvent, LoadReport, TokenDelta
from replica.engine_thread import EngineThread
from replica.inbox import Cancels, Inbox
from replica.step import AsynchronousRunner, Runner, RunnerLost, Step, StepResult

DELIVERIES_MAX = 256  # undelivered reports; beyond it the engine waits for the event loop
STUCK_WAIT_S = 0.02  # between two attempts to plan when there is work but none can be planned
FULL_WAIT_S = 0.1
STOP_TIMEOUT_S = 10.0
LONG_STEP_S = 0.4  # a step predicted to take longer is announced before it runs

_log = structlog.get_logger()
T = TypeVar("T")


class EngineOutput(Protocol):
    @property
    def deltas(self) -> Sequence[tuple[int, TokenDelta]]: ...

    @property
    def events(self) -> Sequence[KvEvent]: ...


class SteppedEngine(Protocol):
    """What this thread needs of an engine (replica.engine)."""

    @property
    def has_work(self) -> bool: ...

    @property
    def predicted_step_s(self) -> float: ...

    def submit(self, owner: int, request: GenerateRequest, arrived_s: float | None = None) -> Bounce | None: ...

    def cancel(self, owner: int, attempt: int) -> object: ...

    def cancel_owner(self, owner: int) -> object: ...

    def plan(self) -> Step | None: ...

    def plan_ahead(self) -> None: ...

    def settle(self, step: Step, result: StepResult | Exception) -> EngineOutput: ...

    def flush(self) -> EngineOutput | None: ...

    def load(self) -> LoadReport: ...

    def snapshot(self) -> Sequence[tuple[bytes, bytes]]: ...


@dataclass(frozen=True, slots=True)
class Report:
    """What one turn of the engine brought. Pairs are (owner, …)."""

    load: LoadReport
    deltas: tuple[tuple[int, TokenDelta], ...] = ()
    accepted: tuple[tuple[int, int], ...] = ()
    bounces: tuple[tuple[int, Bounce], ...] = ()
    cancelled: tuple[tuple[int, int], ...] = ()  # attempts the engine has let go of
    owners_gone: tuple[int, ...] = ()
    events: tuple[KvEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class BlocksSnapshot:
    """Findable blocks for `owner`, as (key, parent): the state after all events delivered before it."""

    owner: int
    blocks: tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class EngineEnded:
    """The engine's thread is over. `reason` is empty after stop()."""

    reason: str


Accepted = tuple[tuple[int, int], ...]
Bounced = tuple[tuple[int, Bounce], ...]
Delivery = Report | BlocksSnapshot | EngineEnded


@dataclass(frozen=True, slots=True)
class Pulse:
    """Is it alive? `waiting_s`: how long work has been pending without progress."""

    alive: bool
    reason: str  # why not
    progress: int
    pending_work: bool
    waiting_s: float


class EngineLoop:
    """start() once, from a running event loop; stop() ends the thread after the running step."""

    def __init__(
        self,
        engine: SteppedEngine,
        runner: Runner,
        deliver: Callable[[Delivery], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        thread: EngineThread | None = None,
        ahead: bool = False,
    ) -> None:
        """`thread`: the one the runner was made on; it is ended with the loop. `ahead`: plan a step while the one before runs."""
        self._engine = engine
        self._runner = runner
        self._deliver = deliver
        self._clock = clock
        attempts_max = 2 * (runner.limits.max_waiting + runner.limits.max_num_seqs)
        self.inbox = Inbox(submits_max=runner.limits.max_waiting, cancels_max=attempts_max, clock=clock)
        self._thread = thread or EngineThread()
        self._ahead = ahead
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: deque[Delivery] = deque()
        self._stopping = False
        self._ended: str | None = None
        self._progress = 0
        self._moved_at_s = clock()  # last progress, or when work came to an idle engine
        self._busy = False
        self._unseen_since_s: float | None = None

    # --- the event loop's side ---

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.submit(self._main)

    async def stop(self) -> None:
        """Idempotent. The running step is waited for, up to STOP_TIMEOUT_S."""
        with self.inbox.condition:
            self._stopping = True
            self.inbox.condition.notify_all()
        self._thread.end()
        if self._thread.is_alive:
            await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    def pulse(self) -> Pulse:
        now_s = self._clock()
        unseen = not self._busy and self.inbox.has_any()  # arrived, and the thread has not woken yet
        if not unseen:
            self._unseen_since_s = None
        elif self._unseen_since_s is None:
            self._unseen_since_s = now_s
        since_s = self._unseen_since_s if self._unseen_since_s is not None else self._moved_at_s
        pending = self._busy or unseen
        waiting_s = now_s - since_s if pending else 0.0
        alive = self._loop is not None and self._thread.is_alive and self._ended is None
        reason = "" if alive else self._ended or "the engine's thread is not running"
        return Pulse(alive, reason, self._progress, pending, max(0.0, waiting_s))

    def _pump(self) -> None:
        was_full = len(self._outbox) >= DELIVERIES_MAX
        while self._outbox:
            self._deliver(self._outbox.popleft())
        if was_full:
            with self.inbox.condition:
                self.inbox.condition.notify_all()

    # --- the engine's thread ---

    def _main(self) -> None:
        reason = ""
        try:
            while self._wait_for_work():
                self._turn()
        except BaseException as error:  # whatever it was, the thread ends here and says so
            reason = f"{type(error).__name__}: {error}"
        self._ended = reason
        self._send(EngineEnded(reason))

    def _wait_for_work(self) -> bool:
        """False: stop."""
        condition = self.inbox.condition
        with condition:
            while not self._stopping:
                if len(self._outbox) >= DELIVERIES_MAX:
                    condition.wait(FULL_WAIT_S)
                elif self._engine.has_work or self.inbox.has_any():
                    if not self._busy:
                        self._moved_at_s = self._clock()
                        self._busy = True
                    return True
                else:
                    self._busy = False
                    condition.wait()
            return False

    def _turn(self) -> None:
        commands = self.inbox.take()
        for owner in commands.snapshots:  # first of all: now the engine agrees with the events told so far
            self._send(BlocksSnapshot(owner, tuple(self._engine.snapshot())))
        self._cancel(commands.cancels)
        accepted, bounces = self._submit(commands.submits)
        cancels = [commands.cancels]
        output: EngineOutput | None
        step = self._engine.plan()
        if step is None:
            output = self._engine.flush()  # aborts, timeouts, events: what needs no step
        else:
            if self._engine.predicted_step_s > LONG_STEP_S:  # who waits for it must not take it for a stall
                self._send(Report(self._engine.load(), accepted=accepted, bounces=bounces))
                accepted, bounces = (), ()
            result = self._execute(step)
            late = self.inbox.take_cancels()
            self._cancel(late)
            cancels.append(late)
            output = self._engine.settle(step, result)
        moved = step is not None or output is not None
        if moved:  # commands alone are no progress: else a busy router would hide an engine that is stuck
            self._progress += 1
            self._moved_at_s = self._clock()
        if moved or not commands.is_empty:
            self._send(
                Report(
                    load=self._engine.load(),
                    deltas=tuple(output.deltas) if output else (),
                    accepted=accepted,
                    bounces=bounces,
                    cancelled=tuple(key for each in cancels for key in each.attempts),
                    owners_gone=tuple(owner for each in cancels for owner in each.owners),
                    events=tuple(output.events) if output else (),
                )
            )
        if not moved and self._engine.has_work:
            with self.inbox.condition:
                if not self._stopping and not self.inbox.has_any():
                    self.inbox.condition.wait(STUCK_WAIT_S)

    def _execute(self, step: Step) -> StepResult | Exception:
        runner = self._runner
        if not self._ahead:
            return _tried(lambda: runner.execute(step))
        wait = _tried(lambda: runner.begin(step)) if isinstance(runner, AsynchronousRunner) else lambda: runner.execute(step)
        self._engine.plan_ahead()
        return wait if isinstance(wait, Exception) else _tried(wait)

    def _submit(self, submits: Sequence[tuple[int, GenerateRequest, float]]) -> tuple[Accepted, Bounced]:
        accepted: list[tuple[int, int]] = []
        bounces: list[tuple[int, Bounce]] = []
        for owner, request, arrived_s in submits:
            bounce = self._submit_one(owner, request, arrived_s)
            if bounce is None:
                accepted.append((owner, request.attempt))
            else:
                bounces.append((owner, bounce))
        return tuple(accepted), tuple(bounces)

    def _submit_one(self, owner: int, request: GenerateRequest, arrived_s: float) -> Bounce | None:
        try:
            return self._engine.submit(owner, request, arrived_s)
        except Exception as error:  # a request that the engine cannot even look at must not end the others
            _log.exception("submit failed", request=request.request_id)
            return Bounce(attempt=request.attempt, reason=BounceReason.BAD_REQUEST, message=f"{type(error).__name__}: {error}")

    def _cancel(self, cancels: Cancels) -> None:
        for owner, attempt in cancels.attempts:
            self._engine.cancel(owner, attempt)
        for owner in cancels.owners:
            self._engine.cancel_owner(owner)

    def _send(self, delivery: Delivery) -> None:
        self._outbox.append(delivery)
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._pump)
        except RuntimeError:  # the event loop is closed: nobody listens any more
            self._stopping = True


def _tried(call: Callable[[], T]) -> T | Exception:
    """Whatever the model code raises must not end the engine; a lost runner does."""
    try:
        return call()
    except RunnerLost:
        raise
    except Exception as error:
        return error
