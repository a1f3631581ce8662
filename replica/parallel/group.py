"""The ranks of one tensor-parallel replica: who they are, the two collectives a model needs, and their deadline.

A model is built against `TensorParallel`; with one rank that is `SingleRank`, which costs nothing. Collectives run in the
same order on every rank, so a rank that fails or vanishes must bring the others down: every collective has a deadline,
and a missed one raises GroupBroken. A broken group is never repaired: its processes end and the replica is replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.distributed_c10d import _set_pg_timeout

from replica.parallel import card
from replica.parallel.all_reduce import AllReduceError, SizedAllReduce, wanted_table
from replica.parallel.card import RankCard
from replica.parallel.interface import InterfaceError, choose_interface
from replica.parallel.step_channel import GroupBroken, Leader, Peer, follow
from replica.step import RunnerLost

Backend = Literal["gloo", "nccl"]
T = TypeVar("T")
_CARD, _READY, _FAILED = b"c", b"r", b"f"


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

    def agree(self, own: RankCard) -> None:
        """Raises GroupBroken, one line, on every rank where any two ranks' cards differ."""
        ...


class SingleRank:
    """One rank: both collectives are the identity."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def agree(self, own: RankCard) -> None:
        """One rank agrees with itself."""


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

    Two channels: `backend` carries tensors under `deadline_s` for each collective; parallel.step_channel carries Steps without
    one, because an idle replica sends none. A vanished peer closes its connections and is seen on both at once; a peer that
    hangs is seen by the next collective's deadline, and before that by who watches the ranks (cluster.rank_watch).
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        secret: bytes,
        host: str = "127.0.0.1",
        backend: Backend = "gloo",
        deadline_s: float = 30.0,
        join_timeout_s: float = 60.0,
    ) -> None:
        """Blocks until every rank has joined. Raises GroupBroken when they have not within `join_timeout_s`.

        `secret` is the group's, by which its ranks know one another. `host` is this process's own address: its interface carries the
        tensors unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names another, and rank 0 listens there. With nccl the caller has
        chosen its device before (torch.cuda.set_device).
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not in 0 … {size - 1}")
        self.rank = rank
        self.size = size
        self.deadline_s = deadline_s
        self.broken = ""  # why, once it is
        self._have_met = False
        self._leader: Leader | None = None
        self._peer: Peer | None = None
        try:
            choose_interface(host)
            store.set_timeout(timedelta(seconds=join_timeout_s))
            if rank == 0:
                self._leader = Leader(store, size, host, secret, join_timeout_s)
            else:
                self._peer = follow(store, rank, secret, join_timeout_s)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=join_timeout_s))
            self._run(dist.barrier)
            self._reduce = _all_reduce(backend)
            _set_pg_timeout(timedelta(seconds=deadline_s))  # only now: joining has a deadline of its own
        except (dist.DistError, RuntimeError, InterfaceError, AllReduceError, RunnerLost) as error:
            self.close()
            raise GroupBroken(f"rank {rank} of {size} could not join: {_first_line(error)}") from error

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._meet_once()
        self._run(lambda: self._reduce(tensor))
        return tensor

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.contiguous()
        gathered = [torch.empty_like(flat) for _ in range(self.size)]
        self._meet_once()
        self._run(lambda: dist.all_gather(gathered, flat))
        return torch.cat(gathered, dim=-1)

    def send(self, message: bytes) -> None:
        """Rank 0: to every other rank."""
        assert self._leader is not None
        leader = self._leader
        self._run(lambda: leader.send(message))

    def receive(self) -> bytes:
        """The others: rank 0's next message; waits as long as rank 0 is connected."""
        assert self._peer is not None
        peer = self._peer
        return self._run(peer.receive)

    def agree(self, own: RankCard) -> None:
        """Every rank shows its card before it reads its shard. Raises GroupBroken on all of them where two differ.

        Without a deadline, as `meet`: a rank may download the model first.
        """
        if self._leader is None:
            self._say(_CARD, card.encode(own))
            refusal = self.receive().decode()
        else:
            others = self._hear(_CARD)
            refusal = card.difference([own, *(card.decode(each) for each in others)])
            self.send(refusal.encode())
        if refusal:
            self.close(refusal)
            raise GroupBroken(refusal)

    def meet(self) -> None:
        """Wait for every rank, without a deadline: ranks read their shards at their own speed. One that leaves ends the wait."""
        if self._leader is None:
            self._say(_READY)
            self.receive()
        else:
            self._hear(_READY)
            self.send(b"")

    def close(self, reason: str = "") -> None:
        """Leave; a rank above 0 that has not met the others says why. Peers that still compute see a closed connection. Idempotent."""
        if not self.broken and reason and self._peer is not None and not self._have_met:
            with contextlib.suppress(GroupBroken):
                self._say(_FAILED, reason.encode())
        self.broken = self.broken or reason or "closed"
        for end in (self._leader, self._peer):
            if end is not None:
                end.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _meet_once(self) -> None:
        """Before the first collective: its deadline is for computing, and the ranks may come from loading."""
        if not self._have_met:
            self._have_met = True
            self.meet()

    def _say(self, kind: bytes, content: bytes = b"") -> None:
        assert self._peer is not None
        peer = self._peer
        self._run(lambda: peer.send(kind + content))

    def _hear(self, kind: bytes) -> list[bytes]:
        """One message of this kind from every other rank. Raises GroupBroken with what a rank says instead."""
        assert self._leader is not None
        contents: list[bytes] = []
        for rank, peer in enumerate(self._leader.peers, start=1):
            message = self._run(peer.receive)
            if message[:1] != kind:
                said = message[1:].decode(errors="replace") if message[:1] == _FAILED else "it is out of step"
                self.close(f"rank {rank}: {said}")
                raise GroupBroken(self.broken)
            contents.append(message[1:])
        return contents

    def _run(self, act: Callable[[], T]) -> T:
        if self.broken:
            raise GroupBroken(f"rank {self.rank}: the group is broken: {self.broken}")
        try:
            return act()
        except (dist.DistError, RuntimeError, RunnerLost) as error:
            self.broken = _first_line(error)
            raise GroupBroken(f"rank {self.rank} of {self.size}: {self.broken}") from error


def _all_reduce(backend: Backend) -> Callable[[torch.Tensor], object]:
    """Between GPUs by a table of sizes; all ranks set it up together."""
    if backend == "gloo":
        return dist.all_reduce
    assert dist.group.WORLD is not None
    device = torch.device("cuda", torch.cuda.current_device())
    return SizedAllReduce(wanted_table(), dist.all_reduce, dist.group.WORLD.group_name, device)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
