"""Tensor parallelism on Ray: the Replica actor is rank 0, and every other rank is an actor of its own, beside it or on another node.

Ranks are owned by their replica: Ray ends them when it ends, however it ends. A rank that dies closes its connections, which
breaks the group at once; the replica then fails its health check and Serve replaces the whole.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.cores import yield_to_others
from replica.config import EngineConfig

if TYPE_CHECKING:
    from replica.parallel.group import RankGroup

JOIN_TIMEOUT_S = 120.0
STORE_TIMEOUT_S = 60.0
_POLL_S = 0.2
# How often libgomp's waiting threads look before they sleep. Its own 300,000 gain nothing (decision 1) and make a step twenty
# times slower as soon as another process wants a core.
SPIN_COUNT = "20000"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class RankError(Exception):
    """A rank could not start; says which and why."""


def limit_threads(threads: int) -> None:
    """For torch and what it loads; read when it is imported, so call this before."""
    for name in THREAD_VARIABLES:
        os.environ[name] = str(threads)
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


class RankWorker:
    """One rank above 0. `run` is its whole life and blocks."""

    def run(self, config: EngineConfig, rank: int, host: str, port: int) -> int:
        """Join, hold this rank's part of the model, carry out Steps until the replica stops; returns how many."""
        yield_to_others()
        limit_threads(config.num_threads or 1)
        from replica.parallel.broadcast import rank_main
        from replica.parallel.group import RankGroup, join_store
        from replica.runner import ModelRunner

        store = join_store(host, port, STORE_TIMEOUT_S)
        group = RankGroup(store, rank=rank, size=config.tensor_parallel_size, join_timeout_s=JOIN_TIMEOUT_S)
        return rank_main(group, lambda tensor_parallel: ModelRunner(config, tp=tensor_parallel))


class RankActors:
    """The ranks of one replica. Keep it as long as the replica lives: without its handles Ray ends them."""

    def __init__(self, actors: list[Any], lives: list[Any]) -> None:
        self._actors = actors
        self._lives = lives

    @classmethod
    async def start(cls, config: EngineConfig, replica_id: str, host: str) -> tuple[RankActors, RankGroup]:
        """Start ranks 1 … and join them as rank 0. Raises RankError when one ends before all have joined."""
        from replica.parallel.group import RankGroup, open_store

        size = config.tensor_parallel_size
        store = open_store(host, STORE_TIMEOUT_S)
        actors = [_create(config, rank, replica_id) for rank in range(1, size)]
        lives = [actor.run.remote(config, rank, host, store.port) for rank, actor in enumerate(actors, start=1)]
        ranks = cls(actors, lives)
        joining = asyncio.create_task(asyncio.to_thread(RankGroup, store, rank=0, size=size, join_timeout_s=JOIN_TIMEOUT_S))
        while not joining.done():
            await asyncio.wait([joining], timeout=_POLL_S)
            if not joining.done():
                ranks.check()
        return ranks, joining.result()

    def check(self) -> None:
        """Raises RankError if a rank has ended."""
        ended, _ = ray.wait(self._lives, num_returns=1, timeout=0)
        if not ended:
            return
        rank = self._lives.index(ended[0]) + 1
        try:
            ray.get(ended[0])
        except Exception as error:
            raise RankError(f"rank {rank} failed: {str(error).strip().splitlines()[-1]}") from None
        raise RankError(f"rank {rank} has stopped")

    def stop(self) -> None:
        """Idempotent. The replica has told them to leave already; what has not is ended."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []


def bundles(config: EngineConfig, cpus: float) -> list[dict[str, float]] | None:
    """What a placement group of the replica reserves, a bundle per rank; None if there is one rank or nothing to reserve."""
    if config.tensor_parallel_size == 1 or cpus <= 0:
        return None
    return [{"CPU": cpus}] * config.tensor_parallel_size


def _create(config: EngineConfig, rank: int, replica_id: str) -> Any:
    """An actor whose name and process title say model, replica and rank."""
    title = f"{config.served_model_name}:Rank{rank}"
    group: PlacementGroup | None = ray.util.get_current_placement_group()
    strategy: Any
    if group is not None:
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
        cpus = float(group.bundle_specs[rank].get("CPU", 0.0))
    else:
        strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        cpus = 0.0
    actor_class = ray.remote(type(title, (RankWorker,), {}))
    return actor_class.options(name=f"{title}:{replica_id}", num_cpus=cpus, scheduling_strategy=strategy, max_restarts=0).remote()
