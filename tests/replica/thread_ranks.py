"""The ranks of a replica as threads of one process: Steps travel as bytes, a collective waits for all ranks."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from replica.parallel.broadcast import LeadingRunner, Worker, rank_main
from replica.parallel.card import RankCard, difference
from replica.parallel.step_channel import GroupBroken

WAIT_S = 60.0


class Ranks:
    """What the members share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self.messages: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in range(size)]

    def gather(self, rank: int, part: Any) -> list[Any]:
        try:
            self.parts[rank] = part
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise GroupBroken(f"rank {rank}: another rank has left") from None
        parts = list(self.parts)
        with contextlib.suppress(threading.BrokenBarrierError):  # one that has its parts may leave before another wakes up
            self.barrier.wait()
        return parts


class Rank:
    """A member; has what a RankGroup has."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.size = ranks, rank, ranks.size
        self.broken = ""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self.ranks.gather(self.rank, tensor.clone())).sum(0))

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.ranks.gather(self.rank, tensor.clone()), dim=-1)

    def agree(self, own: RankCard) -> None:
        refusal = difference(self.ranks.gather(self.rank, own))
        if refusal:
            raise GroupBroken(refusal)

    def meet(self) -> None:
        self.ranks.gather(self.rank, None)

    def send(self, message: bytes) -> None:
        for messages in self.ranks.messages[1:]:
            messages.put(message)

    def receive(self) -> bytes:
        return self.ranks.messages[self.rank].get(timeout=WAIT_S)

    def close(self, reason: str = "") -> None:
        if reason:
            self.ranks.barrier.abort()
        self.broken = self.broken or reason or "closed"


def lead(size: int, make: Callable[[Any], Worker], work: Callable[[LeadingRunner], Any]) -> Any:
    """What `work` returns with rank 0's runner of a replica whose ranks are made by `make(group)`; the other ranks have stopped by then."""
    ranks = Ranks(size)
    failed: list[Exception] = []

    def follow(rank: int) -> None:
        try:
            rank_main(Rank(ranks, rank), make)  # type: ignore[arg-type]
        except Exception as error:
            failed.append(error)

    followers = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, size)]
    for thread in followers:
        thread.start()
    group = Rank(ranks, 0)
    runner = LeadingRunner(make(group), group)  # type: ignore[arg-type]
    try:
        return work(runner)
    finally:
        runner.close()
        for thread in followers:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert not failed
