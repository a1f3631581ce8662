"""One simulation as a value: what is simulated, and how to run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from bench.simulator.cost import Profile, scaled
from bench.simulator.cost_replica import CostReplica
from bench.simulator.course import Course
from bench.simulator.engine_replica import EngineReplica
from bench.simulator.fault import Fault
from bench.simulator.score import score
from bench.simulator.simulated_replica import SimulatedReplica
from bench.simulator.slo import Slo
from bench.simulator.trace import TraceRequest
from bench.simulator.world import START_S, Layout, World
from replica.contract.messages import StepTimeCoefficients
from router.config import RouterConfig

_UNBOUNDED = {"queue_time_slo_s": 1e6, "queue_depth_max": 1_000_000, "queue_tokens_max": 1_000_000_000_000}


@dataclass(frozen=True, slots=True)
class Setup:
    """`admission` off: everybody is admitted at once; on: clients ask for the SLO that they are judged by.

    `told`: factor on the coefficients that replicas report, against the true ones.

    `kv`: "free" is the cost model (running KV free, a prefix cache of `profile.cache_blocks`); "production" is the real engine
    with a pool of that many blocks, whose steps cost what `course` says of the time, if there is one.
    """

    layout: Layout = field(default_factory=Layout)
    profile: Profile = field(default_factory=Profile)
    router: RouterConfig = field(default_factory=RouterConfig)
    admission: bool = False
    kv: Literal["free", "production"] = "free"
    told: float = 1.0
    noise: float = 0.0
    course: Course | None = None
    checks: bool = False

    def world(self) -> World:
        config = self.router if self.admission else self.router.model_copy(update=_UNBOUNDED)
        return World(config, self.layout, self._replica)

    def run(self, requests: Sequence[TraceRequest], slo: Slo, faults: Sequence[Fault] = ()) -> dict[str, Any]:
        asking = replace(self, layout=replace(self.layout, asks=slo)) if self.admission else self
        world = asking.world()
        world.run(requests, faults)
        return score(world, slo)

    def _replica(self, index: int, epoch: int) -> SimulatedReplica:
        seed = self.layout.seed * 1_000_003 + index * 1_009 + epoch
        told = scaled(self.profile.step_time, self.told)
        if self.kv == "production":
            costs_at = None if self.course is None else partial(_of_trace, self.course)
            return EngineReplica(self.profile, seed=seed, told=told, noise=self.noise, checks=self.checks, costs_at=costs_at)
        return CostReplica(self.profile, seed=seed, told=told, noise=self.noise, streams=self.layout.keeps_tokens)


def _of_trace(course: Course, now: float) -> StepTimeCoefficients:
    """The world is a little older than the trace."""
    return course.at(now - START_S)
