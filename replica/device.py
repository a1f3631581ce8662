"""What the runner asks of an accelerator, and nothing more: so that all but these calls runs on a CPU too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the whole device, whoever uses them."""

    free_bytes: int
    total_bytes: int


class Graph(Protocol):
    """A recorded piece of work: `replay` does it again on the same tensors, which may have other contents."""

    def replay(self) -> None: ...


class Device(Protocol):
    """One accelerator."""

    @property
    def torch_device(self) -> torch.device: ...

    def memory(self) -> Memory: ...

    def reset_peak(self) -> None:
        """`peak_bytes` counts from now."""
        ...

    def peak_bytes(self) -> int:
        """The most that torch has held since."""
        ...

    def held_bytes(self) -> int:
        """What torch holds now, cached blocks included."""
        ...

    def release_cached(self) -> None: ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory that the device copies from by itself."""
        ...

    def copied(self) -> Callable[[], None]:
        """Wait, when called, until the copies begun so far have read their source."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record `work`, collectives included. It has run before on the same shapes, and asks the host for nothing."""
        ...

    def synchronize(self) -> None: ...


class CudaDevice:
    """A CUDA device, the current one of this process."""

    def __init__(self, torch_device: torch.device) -> None:
        self._device = torch_device
        self._pool: Any = None  # graphs share one memory pool: they never run at the same time

    @property
    def torch_device(self) -> torch.device:
        return self._device

    def memory(self) -> Memory:
        return Memory(*torch.cuda.mem_get_info(self._device))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    def held_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def copied(self) -> Callable[[], None]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    def capture(self, work: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        # thread_local: the process's other threads (NCCL's watchdog, the link) may go on calling CUDA meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        self._pool = self._pool or graph.pool()
        return graph

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)
