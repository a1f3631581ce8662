"""Tensor parallelism on Ray: the Replica actor is rank 0, and every other rank is an actor of its own, beside it or on another node.

Ranks are owned by their replica: Ray ends them when it ends, however it ends, and the kernel ends them when their raylet does. A
rank that dies closes its connections, which breaks the group at once; cluster.rank_watch then gives up the whole, which Serve replaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.cores import yield_to_others
from cluster.guardian import start_of
from replica.config import EngineConfig

if TYPE_CHECKING:
    from replica.parallel.group import RankGroup

JOIN_TIMEOUT_S = 60.0  # once every rank's process runs
_POLL_S = 0.2
_WHY_TIMEOUT_S = 2.0  # a rank that ended tells why this soon
# How often libgomp's waiting threads look before they sleep. Its own 300,000 gain nothing (decision 1) and make a step twenty
# times slower as soon as another process wants a core.
SPIN_COUNT = "20000"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_PR_SET_PDEATHSIG = 1
SECRET_BYTES = 32


class RankError(Exception):
    """A rank could not start, or is lost; says which and why, in one line."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a rank runs: `start` tells its process from a later one of the same number."""

    pid: int
    start: str | None
    node_id: str
    devices: str | None  # CUDA_VISIBLE_DEVICES, as Ray has set it

    @classmethod
    def mine(cls) -> Whereabouts:
        pid = os.getpid()
        return cls(pid, start_of(pid), ray.get_runtime_context().get_node_id(), os.environ.get(DEVICES_VARIABLE))


def limit_threads(threads: int) -> None:
    """For torch and what it loads; read when it is imported, so call this before."""
    for name in THREAD_VARIABLES:
        os.environ[name] = str(threads)
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def die_with_parent() -> None:
    """SIGKILL when the process above, a raylet, is gone: a rank that is frozen then could not notice by itself."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it went before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def last_line(error: BaseException) -> str:
    """What an error says at its end, where Ray puts the cause, without the class's name; the name if it says nothing."""
    line = (str(error).strip() or type(error).__name__).splitlines()[-1]
    kind, separator, said = line.partition(": ")
    return said if separator and "." in kind and " " not in kind else line


class RankWorker:
    """One rank above 0. `run` is its whole life and blocks; `beat` answers meanwhile, on another thread."""

    def __init__(self, threads: int) -> None:
        """Imports what `run` needs, while rank 0 and the other ranks do the same."""
        yield_to_others()
        limit_threads(threads)
        import replica.parallel.broadcast
        import replica.runner  # noqa: F401

    def run(self, config: EngineConfig, rank: int, host: str, port: int, secret: bytes) -> int:
        """Join, hold this rank's part of the model, carry out Steps until the replica stops; returns how many."""
        die_with_parent()
        yield_to_others()  # this thread too
        from replica.parallel.broadcast import rank_main
        from replica.runner import ModelRunner

        group = join_group(config, rank, host, port, secret)
        return rank_main(group, lambda tensor_parallel: ModelRunner(config, tp=tensor_parallel))

    def beat(self) -> Whereabouts:
        return Whereabouts.mine()


class RankActors:
    """The ranks of one replica. Keep it as long as the replica lives: without its handles Ray ends them."""

    def __init__(self, actors: list[Any], lives: list[Any]) -> None:
        self.actors = actors
        self._lives = lives
        self.whereabouts: dict[int, Whereabouts] = {}  # by rank, as last heard

    @classmethod
    async def start(cls, config: EngineConfig, replica_id: str, host: str) -> tuple[RankActors, RankGroup]:
        """Start ranks 1 … and join them as rank 0. Raises RankError when one ends before all have joined, or some do not come."""
        actors = [_create(config, rank, replica_id) for rank in range(1, config.tensor_parallel_size)]
        from replica.parallel.group import open_store  # imports torch, as the ranks do meanwhile

        store, secret = open_store(host, JOIN_TIMEOUT_S), secrets.token_bytes(SECRET_BYTES)
        await _all_run(actors)
        lives = [actor.run.remote(config, rank, host, store.port, secret) for rank, actor in enumerate(actors, start=1)]
        ranks = cls(actors, lives)
        joining = asyncio.create_task(asyncio.to_thread(join_group, config, 0, host, 0, secret, store))
        while not joining.done():
            await asyncio.wait([joining], timeout=_POLL_S)
            if not joining.done():
                ranks.check()
        try:
            return ranks, joining.result()
        except Exception as error:
            raise await ranks.why(error) from None

    def check(self) -> None:
        """Raises RankError if a rank has ended."""
        ended, _ = ray.wait(self._lives, num_returns=1, timeout=0)
        if not ended:
            return
        rank = self._lives.index(ended[0]) + 1
        try:
            ray.get(ended[0])
        except Exception as error:
            raise RankError(_failed(rank, error)) from None
        raise RankError(f"rank {rank} has stopped")

    async def why(self, error: Exception) -> RankError:
        """What went wrong, in a rank's own words where one has ended: rank 0 itself only notices that another is gone."""
        if str(error).startswith("rank 0 of"):
            for _ in range(int(_WHY_TIMEOUT_S / _POLL_S)):
                try:
                    self.check()
                except RankError as found:
                    return found
                await asyncio.sleep(_POLL_S)
        return RankError(" ".join(str(error).split()))

    def kill(self) -> None:
        """At once, whatever they do: a frozen process of this node hears no request of Ray's. Idempotent."""
        here = ray.get_runtime_context().get_node_id()
        for known in self.whereabouts.values():
            if known.node_id == here and known.start is not None and start_of(known.pid) == known.start:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(known.pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        """Idempotent. The replica has told them to leave already; what has not is ended."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []


def _failed(rank: int, error: Exception) -> str:
    said = last_line(error)
    return said if said.startswith(f"rank {rank} ") else f"rank {rank} failed: {said}"


async def _all_run(actors: list[Any]) -> None:
    """Until Ray has placed and started every rank; how long that may take is the start's own limit. Raises RankError."""
    for rank, actor in enumerate(actors, start=1):
        try:
            await actor.beat.remote()
        except Exception as error:
            raise RankError(_failed(rank, error)) from None


def join_group(config: EngineConfig, rank: int, host: str, port: int, secret: bytes, store: Any = None) -> RankGroup:
    """This rank's membership; `host` and `port` are rank 0's store, which rank 0 itself gives. Blocks. Raises GroupBroken."""
    from kernels.ops import KernelError, choose_device
    from replica.parallel.group import RankGroup, join_store

    try:
        device = choose_device(rank, config.device)
    except KernelError as error:
        raise RankError(f"rank {rank}: {error}") from None
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)
    own = str(ray.util.get_node_ip_address())
    return RankGroup(
        store if store is not None else join_store(host, port, JOIN_TIMEOUT_S),
        rank=rank,
        size=config.tensor_parallel_size,
        secret=secret,
        host=host if rank == 0 else own,
        backend="nccl" if device.type == "cuda" else "gloo",
        join_timeout_s=JOIN_TIMEOUT_S,
    )


def _create(config: EngineConfig, rank: int, replica_id: str) -> Any:
    title = f"{config.served_model_name}:Rank{rank}"
    return create(RankWorker, title, rank, config.num_threads or 1, name=f"{title}:{replica_id}")


def create(worker: type, title: str, rank: int, *arguments: Any, name: str | None = None, group: PlacementGroup | None = None) -> Any:
    """`worker(*arguments)` as an actor in bundle `rank` of `group`, or of this process's placement group, else beside it.

    Its process title says what it is.
    """
    group = group or ray.util.get_current_placement_group()
    strategy: Any
    reserved: dict[str, float] = {}
    if group is not None:
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
        reserved = group.bundle_specs[rank]
    else:
        strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {
        "name": name,
        "num_cpus": float(reserved.get("CPU", 0.0)),
        "num_gpus": float(reserved.get("GPU", 0.0)),
        "scheduling_strategy": strategy,
        "max_restarts": 0,
        "max_concurrency": 2,  # `run` takes one thread for good
    }
    return ray.remote(type(title, (worker,), {})).options(**options).remote(*arguments)
