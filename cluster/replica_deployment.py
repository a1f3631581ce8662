"""The Serve deployment of one engine: lifecycle only. Its tokens travel on the link, of which Serve knows nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

import ray
from ray import serve

from cluster import membership, telemetry
from cluster.config import Config
from cluster.cores import threads_per_replica, usable_cores, yield_to_others
from cluster.known_steps import KnownSteps
from cluster.rank_actors import RankActors, RankError, die_with_parent, last_line, limit_threads
from cluster.rank_watch import SILENCE_S, RankWatch

if TYPE_CHECKING:
    from replica.config import EngineConfig
    from replica.parallel.group import RankGroup

EXIT_GROUP_LOST = 70
KEEP_EVERY_S = 60.0  # what steps take: who is killed keeps nothing at the end
KEEP_MAX_S = 2.0  # at the end: it must not hold up a stop
LATE_S = 9.0  # routers move a stalled replica's streams at once; the first step of a kind, compiled or recorded, may stall for this long


class Replica:
    """Started and stopped by Serve. Serve awaits `__del__` before it kills the process: that is where streams drain."""

    async def __init__(self, config: Config, secret: bytes) -> None:  # type: ignore[misc]  # Serve awaits it
        context = serve.get_replica_context()
        self._replica_id = context.replica_id.unique_id
        self._ranks: RankActors | None = None
        self._stalled_since_s: float | None = None
        self._drain_timeout_s = config.router.drain_timeout_s
        telemetry.configure(config.serve, process=f"replica {self._replica_id}")
        self._log = telemetry.logger().bind(model=config.model_name, replica=self._replica_id)
        threads = config.engine.num_threads or threads_per_replica(
            usable_cores(), config.serve.replicas * config.engine.tensor_parallel_size, config.serve.replica_cpus
        )
        yield_to_others()
        limit_threads(threads)  # before torch is imported, which happens below for the first time
        from replica.server import ReplicaServer

        engine = config.engine.model_copy(update={"num_threads": threads, "served_model_name": config.model_name})
        host = str(ray.util.get_node_ip_address())
        group = await self._start_ranks(engine, host)
        self._steps = KnownSteps(engine, ray.get_runtime_context().get_node_id(), self._log)
        server = ReplicaServer(
            engine,
            replica_id=self._replica_id,
            secret=secret,
            host=host,
            on_stage=self._on_stage,
            group=group,
            recall_step_time=self._steps.recall,
        )
        await self._started(server.start())
        self._server = server
        self._keeping = asyncio.create_task(self._keep_steps())
        self._dtype, self._kernels = self._server.dtype, self._server.kernels
        gc.collect()
        gc.freeze()  # model and libraries stay: a collection in the middle of a step need not look at them
        self._log.info("replica ready", threads=threads, kernels=self._kernels)

    async def _keep_steps(self) -> None:
        """What steps take, from time to time as it is learned."""
        while True:
            await asyncio.to_thread(self._steps.keep, self._server.step_time)
            await asyncio.sleep(KEEP_EVERY_S)

    async def _start_ranks(self, engine: EngineConfig, host: str) -> RankGroup | None:
        """Ranks 1 …, watched from now on. Raises RankError."""
        if engine.tensor_parallel_size == 1 or engine.runner == "mock":
            return None
        die_with_parent()
        self._ranks, group = await RankActors.start(engine, self._replica_id, host)
        self._watch = RankWatch(self._ranks)
        self._lost = asyncio.create_task(self._watch.lost())
        return group

    async def _started(self, start: Any) -> None:
        """Wait for the engine. What a rank has to say about it is said as its RankError."""
        if self._ranks is None:
            await start
            return
        from replica.step import RunnerLost

        starting = asyncio.create_task(start)
        await asyncio.wait([starting, self._lost], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            raise RankError(self._lost.result())
        try:
            starting.result()
        except RunnerLost as error:
            raise await self._ranks.why(error) from None
        self._watch.silence_s, self._watch.engine_fault = SILENCE_S, self._engine_fault
        self._lost.add_done_callback(self._watch_over)

    def _engine_fault(self) -> str:
        """Why it will not go on: its thread is over, or it has stalled for so long that no busy machine explains it."""
        if not self._server.pulse().alive:
            return self._server.pulse().reason
        try:
            self._server.check_health()
        except Exception as error:
            self._stalled_since_s = self._stalled_since_s or time.monotonic()
            return str(error) if time.monotonic() - self._stalled_since_s > LATE_S else ""
        self._stalled_since_s = None
        return ""

    def _watch_over(self, lost: asyncio.Task[str]) -> None:
        """The watch has ended: a rank is lost, or nobody would see that one is."""
        if lost.cancelled():
            return
        error = lost.exception()
        self._give_up(lost.result() if error is None else f"the watch over the ranks failed: {last_line(error)}")

    def _give_up(self, reason: str) -> NoReturn:
        """The group is lost: nothing can be drained or closed that would not wait for it."""
        self._log.error("tensor-parallel group lost, the replica ends", reason=reason)
        assert self._ranks is not None
        self._ranks.kill()
        (sys.__stderr__ or sys.stderr).flush()
        os._exit(EXIT_GROUP_LOST)

    def record_replica_metadata(self) -> dict[str, Any]:
        host, port = self._server.address
        return membership.publish(host, port)

    def check_health(self) -> None:
        """Raises when the engine makes no progress with work pending: Serve replaces the replica. Of several ranks, when all are lost."""
        if self._ranks is None:
            self._server.check_health()
        elif reason := self._engine_fault():
            raise RankError(reason)

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._server.stats().items() if isinstance(value, int | float)}

    async def stats(self) -> dict[str, Any]:
        """For people and tests; load for routing travels on the link."""
        return {"replica_id": self._replica_id, "pid": os.getpid(), "dtype": self._dtype, "kernels": self._kernels, **self._server.stats()}

    async def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is None:  # the constructor failed
            return
        self._keeping.cancel()
        del self._server
        if self._ranks is not None:
            self._watch.engine_fault = lambda: ""  # it stops; a rank that is lost meanwhile still ends the drain
        await server.drain(self._drain_timeout_s)
        if self._ranks is not None:
            self._lost.cancel()  # they leave now
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._steps.keep, server.step_time), KEEP_MAX_S)
        await server.stop()
        if self._ranks is not None:
            self._ranks.stop()
        self._log.info("replica stopped")

    def _on_stage(self, stage: str, seconds: float) -> None:
        self._log.info("stage", stage=stage, seconds=round(seconds, 3))
