"""What `rantang doctor` runs on every rank: join as a replica's ranks do, add up tensors of several sizes, say how fast it went."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.rank_actors import JOIN_TIMEOUT_S, Whereabouts, die_with_parent, join_group, limit_threads
from replica.config import EngineConfig

if TYPE_CHECKING:
    from torch import Tensor

SIZES_BYTES = (16 * 1024, 1024 * 1024, 16 * 1024 * 1024)
_REPEATS = 10


@dataclass(frozen=True, slots=True)
class Timing:
    """One size of all-reduce: the median of ten, and what that is on the wire by the ring's count, 2 (n - 1) / n of the tensor."""

    size_bytes: int
    seconds: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class RankReport:
    rank: int
    address: str
    whereabouts: Whereabouts
    device: str
    backend: str
    interface: str
    torch: str
    timings: tuple[Timing, ...]

    @property
    def line(self) -> str:
        seen = "" if self.whereabouts.devices is None else f" (CUDA_VISIBLE_DEVICES={self.whereabouts.devices})"
        where = f"{self.address} (node {self.whereabouts.node_id[:8]}), {self.device}{seen}"
        return f"rank {self.rank}: ok, {where}, {self.backend} on {self.interface}, torch {self.torch}"


class CheckedRank:
    """An actor where a replica's rank would be."""

    def __init__(self) -> None:
        self._store: Any = None

    def open(self, host: str) -> int:
        """Rank 0: the meeting place; its port."""
        limit_threads(1)
        from replica.parallel.group import open_store

        self._store = open_store(host, JOIN_TIMEOUT_S)
        return int(self._store.port)

    def address(self) -> str:
        import ray

        return str(ray.util.get_node_ip_address())

    def check(self, config: EngineConfig, rank: int, host: str, port: int, secret: bytes) -> RankReport:
        """Raises what keeps this rank from joining or adding up, in one line."""
        die_with_parent()
        limit_threads(1)
        import os

        import torch

        from kernels.ops import choose_device
        from replica.parallel.interface import GLOO, NCCL

        group = join_group(config, rank, host, port, secret, self._store)
        try:
            device = choose_device(rank, config.device)
            backend = "nccl" if device.type == "cuda" else "gloo"
            timings = tuple(_timed(group, torch.ones(size // 4, device=device), device.type == "cuda") for size in SIZES_BYTES)
        finally:
            group.close()
        interface = os.environ.get(NCCL if backend == "nccl" else GLOO, "its own choice")
        return RankReport(rank, self.address(), Whereabouts.mine(), str(device), backend, interface, torch.__version__, timings)


def _timed(group: Any, tensor: Tensor, on_gpu: bool) -> Timing:
    """Raises RuntimeError when the sum is wrong."""
    import torch

    took: list[float] = []
    for _ in range(_REPEATS):
        tensor.fill_(group.rank + 1.0)
        if on_gpu:
            torch.cuda.synchronize()
        began_s = time.perf_counter()
        group.all_reduce(tensor)
        if on_gpu:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began_s)
    expected = group.size * (group.size + 1) / 2
    if not bool((tensor == expected).all()):
        raise RuntimeError(f"rank {group.rank}: the sum over ranks is {float(tensor[0])}, not {expected}")
    seconds = sorted(took)[len(took) // 2]
    size = tensor.numel() * tensor.element_size()
    return Timing(size, seconds, 2 * (group.size - 1) / group.size * size / seconds)
