"""The Serve deployment of one engine: lifecycle only. Its tokens travel on the link, of which Serve knows nothing."""

from __future__ import annotations

import gc
import os
from typing import Any

import ray
from ray import serve

from cluster import membership, telemetry
from cluster.config import Config
from cluster.cores import threads_per_replica, usable_cores, yield_to_others
from cluster.rank_actors import RankActors, limit_threads


class Replica:
    """Started and stopped by Serve. Serve awaits `__del__` before it kills the process: that is where streams drain."""

    async def __init__(self, config: Config, secret: bytes) -> None:  # type: ignore[misc]  # Serve awaits it
        context = serve.get_replica_context()
        self._replica_id = context.replica_id.unique_id
        self._ranks: RankActors | None = None
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
        group = None
        if engine.tensor_parallel_size > 1 and engine.runner != "mock":
            self._ranks, group = await RankActors.start(engine, self._replica_id, host)
        self._server = ReplicaServer(engine, replica_id=self._replica_id, secret=secret, host=host, on_stage=self._on_stage, group=group)
        await self._server.start()
        self._dtype, self._kernels = self._server.dtype, self._server.kernels
        gc.collect()
        gc.freeze()  # model and libraries stay: a collection in the middle of a step need not look at them
        self._log.info("replica ready", threads=threads, kernels=self._kernels)

    def record_replica_metadata(self) -> dict[str, Any]:
        host, port = self._server.address
        return membership.publish(host, port)

    def check_health(self) -> None:
        """Raises when the engine makes no progress with work pending, or a rank is gone: Serve replaces the replica."""
        if self._ranks is not None:
            self._ranks.check()
        self._server.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._server.stats().items() if isinstance(value, int | float)}

    async def stats(self) -> dict[str, Any]:
        """For people and tests; load for routing travels on the link."""
        return {"replica_id": self._replica_id, "pid": os.getpid(), "dtype": self._dtype, "kernels": self._kernels, **self._server.stats()}

    async def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is None:  # the constructor failed
            return
        del self._server
        await server.drain(self._drain_timeout_s)
        await server.stop()
        if self._ranks is not None:
            self._ranks.stop()
        self._log.info("replica stopped")

    def _on_stage(self, stage: str, seconds: float) -> None:
        self._log.info("stage", stage=stage, seconds=round(seconds, 3))
