"""The real engine (scheduler, KV manager, fit of the step time) under the virtual clock, with a runner that costs but does not compute."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from bench.simulator.cost import Profile
from bench.simulator.simulated_replica import Turn
from replica.config import EngineConfig
from replica.contract.messages import Bounce, EngineLimits, GenerateRequest, LoadReport, StepTimeCoefficients
from replica.engine import Engine, EngineOutput
from replica.mock_runner import MockRunner, modelled_step_s
from replica.step import Step
from replica.step_time_fit import StepTimeFit

MODEL = "simulated"
_NO_SLO_MS = 1e9


class EngineReplica:
    """Commands are taken between steps, as the engine's own loop does."""

    def __init__(
        self,
        profile: Profile,
        *,
        seed: int = 0,
        told: StepTimeCoefficients | None = None,
        noise: float = 0.0,
        checks: bool = False,
        costs_at: Callable[[float], StepTimeCoefficients] | None = None,
    ) -> None:
        """`told`: what the engine believes at first; `checks`: every invariant after every step; `costs_at`: what a step that begins
        then costs, if not always what the profile says."""
        self.profile = profile
        self.slowness = 1.0
        self._now = 0.0
        self._noise = noise
        self._checks = checks
        self._costs_at = costs_at or (lambda now: profile.step_time)
        self._random = Random(seed)
        self._runner = MockRunner(profile.limits(), sleep=_instantly)
        slo_s = profile.step_slo_s
        config = EngineConfig(
            model=MODEL,
            served_model_name=MODEL,
            max_num_batched_tokens=profile.max_num_batched_tokens,
            max_num_seqs=profile.max_num_seqs,
            inter_token_slo_ms=_NO_SLO_MS if slo_s is None else slo_s * 1000,
        )
        fit = StepTimeFit(told or profile.step_time)
        self._engine = Engine(self._runner, config, MODEL, "", lambda: self._now, step_time=fit)
        self._step: Step | None = None
        self._submits: list[tuple[int, GenerateRequest, float]] = []
        self._accepted: list[tuple[int, int]] = []
        self._bounces: list[tuple[int, Bounce]] = []

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    @property
    def is_stepping(self) -> bool:
        return self._step is not None

    @property
    def holds(self) -> int:
        return len(self._engine.ledger) + len(self._submits)

    def submit(self, owner: int, request: GenerateRequest, now: float) -> None:
        self._submits.append((owner, request, now))

    def cancel(self, owner: int, attempt: int) -> None:
        self._submits = [each for each in self._submits if (each[0], each[1].attempt) != (owner, attempt)]
        self._engine.cancel(owner, attempt)

    def cancel_owner(self, owner: int) -> None:
        self._submits = [each for each in self._submits if each[0] != owner]
        self._engine.cancel_owner(owner)

    def begin(self, now: float) -> float | None:
        if self._step is not None:
            return None
        self._now = now
        submits, self._submits = self._submits, []
        for owner, request, came_s in submits:
            bounce = self._engine.submit(owner, request, came_s)
            if bounce is None:
                self._accepted.append((owner, request.attempt))
            else:
                self._bounces.append((owner, bounce))
        self._step = self._engine.plan()
        if self._step is None:
            return None
        took_s = modelled_step_s(self._costs_at(now), self._step) * self.slowness
        return took_s * max(0.1, self._random.gauss(1.0, self._noise)) if self._noise else took_s

    def end(self, now: float) -> Turn:
        assert self._step is not None
        self._now = now
        step, self._step = self._step, None
        output = self._engine.settle(step, self._runner.execute(step))
        if self._checks:
            self.check()
        return self._turn(output)

    def beat(self, now: float) -> Turn:
        self._now = now
        return self._turn(self._engine.flush())

    def load(self) -> LoadReport:
        return self._engine.load()

    def snapshot(self) -> tuple[tuple[bytes, bytes], ...]:
        return self._engine.snapshot()

    def check(self) -> None:
        self._engine.check()

    def _turn(self, output: EngineOutput | None) -> Turn:
        turn = Turn(
            load=self._engine.load(),
            deltas=output.deltas if output else (),
            accepted=tuple(self._accepted),
            bounces=tuple(self._bounces),
            events=output.events if output else (),
        )
        self._accepted, self._bounces = [], []
        return turn


def _instantly(seconds: float) -> None:
    """The world lets the time pass."""
