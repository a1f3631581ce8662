"""The ranks of one tensor-parallel replica: who they are, the two collectives a model needs, and their deadline.

A model is built against `TensorParallel`; with one rank that is `SingleRank`, which costs nothing. Collectives run in the
same order on every rank, so a rank that fails or vanishes must bring the others down: every collective has a deadline,
and a missed one raises GroupBroken. A broken group is never repaired: its processes end and the replica is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.distributed_c10d import _set_pg_timeout

from replica.step import RunnerLost

Backend = Literal["gloo", "nccl"]
IDLE_DEADLINE = timedelta(days=365)  # a rank waits for the next Step this long; a closed connection ends the wait at once


class GroupBroken(RunnerLost):
    """A peer is gone, late or out of step. Nothing can be computed with this group any more."""


class TensorParallel(Protocol):
    """What a sharded layer needs to know and to ask."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place; returns `tensor`. Every rank gives the same shape and dtype."""
        ...

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        """[…, n] on each rank → […, n · size] on every rank, in the order of ranks. Returns a new, contiguous tensor."""
        ...


class SingleRank:
    """One rank: both collectives are the identity."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Rank 0's meeting place, on a free port (`store.port`). Give (host, port) to the other ranks."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Another rank's view of rank 0's store. Raises GroupBroken when rank 0 cannot be reached in time."""
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except (dist.DistError, RuntimeError) as error:
        raise GroupBroken(f"no rendezvous at {host}:{port} within {timeout_s:g} s: {error}") from error


class RankGroup:
    """All ranks of a replica, joined through `store`. One per process and replica.

    Two channels: `backend` carries tensors under `deadline_s` for each collective; gloo carries Steps (parallel.broadcast)
    without one, because an idle replica sends none. A vanished peer closes its connections and is seen on both at once;
    a peer that hangs is seen by the next collective's deadline.
    """

    def __init__(
        self, store: Store, *, rank: int, size: int, backend: Backend = "gloo", deadline_s: float = 30.0, join_timeout_s: float = 120.0
    ) -> None:
        """Blocks until every rank has joined. Raises GroupBroken when they have not within `join_timeout_s`.

        With nccl the caller has chosen its device before (torch.cuda.set_device).
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not in 0 … {size - 1}")
        self.rank = rank
        self.size = size
        self.deadline_s = deadline_s
        self.broken = ""  # why, once it is
        self._have_met = False
        joining = timedelta(seconds=join_timeout_s)
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=joining)
            self._steps = dist.new_group(backend="gloo", timeout=joining)
            self._run(dist.barrier)
            _set_pg_timeout(timedelta(seconds=deadline_s))
            _set_pg_timeout(IDLE_DEADLINE, self._steps)  # only now: joining has a deadline, waiting for a Step has none
        except (dist.DistError, RuntimeError) as error:
            self.close()
            raise GroupBroken(f"rank {rank} of {size} could not join within {join_timeout_s:g} s: {error}") from error

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._meet_once()
        self._run(lambda: dist.all_reduce(tensor))
        return tensor

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.contiguous()
        gathered = [torch.empty_like(flat) for _ in range(self.size)]
        self._meet_once()
        self._run(lambda: dist.all_gather(gathered, flat))
        return torch.cat(gathered, dim=-1)

    def broadcast_from_first(self, buffer: torch.Tensor) -> None:
        """Rank 0's CPU `buffer` into everyone's, on the Step channel: waits as long as rank 0 is connected."""
        self._run(lambda: dist.broadcast(buffer, src=0, group=self._steps))

    def meet(self) -> None:
        """Wait for every rank, without a deadline: ranks read their shards at their own speed. One that leaves ends the wait."""
        self._run(lambda: dist.barrier(group=self._steps))

    def _meet_once(self) -> None:
        """Before the first collective: its deadline is for computing, and the ranks may come from loading."""
        if not self._have_met:
            self._have_met = True
            self.meet()

    def close(self) -> None:
        """Leave. Peers that still compute see a closed connection. Idempotent."""
        self.broken = self.broken or "closed"
        if dist.is_initialized():
            dist.destroy_process_group()

    def _run(self, collective: Callable[[], object]) -> None:
        if self.broken:
            raise GroupBroken(f"rank {self.rank}: the group is broken: {self.broken}")
        try:
            collective()
        except (dist.DistError, RuntimeError) as error:
            self.broken = str(error).splitlines()[0]
            raise GroupBroken(f"rank {self.rank} of {self.size}: {self.broken}") from error
