"""A stand-in for an accelerator on the CPU: what is recorded is done again when it is replayed, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from replica.device import Memory


class Recorded:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class HostDevice:
    """`peak` and `held` are what it says of its memory; `waits` counts waits for copies that had begun."""

    torch_device = torch.device("cpu")

    def __init__(self, *, total: int = 1 << 30, free: int = 1 << 30, held: int = 0, peak: int = 0) -> None:
        self._memory = Memory(free, total)
        self._held, self._peak = held, peak
        self.captures = 0
        self.waits = 0

    def memory(self) -> Memory:
        return self._memory

    def reset_peak(self) -> None: ...

    def peak_bytes(self) -> int:
        return self._peak

    def held_bytes(self) -> int:
        return self._held

    def release_cached(self) -> None: ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def copied(self) -> Callable[[], None]:
        def wait() -> None:
            self.waits += 1

        return wait

    def capture(self, work: Callable[[], None]) -> Recorded:
        self.captures += 1
        work()  # as a device does while it records, but for the results
        return Recorded(work)

    def synchronize(self) -> None: ...
