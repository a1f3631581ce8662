"""What the machine gives at best, measured in the same call as everything that is compared with it."""

from __future__ import annotations

import statistics

import torch

from bench.kernels.timing import Ceilings, Device, Timer

COPY_BYTES = 1 << 30
MATMUL_SIDE = 8192
REPEATS = 15


def device_of(place: torch.device) -> Device:
    known = torch.cuda.get_device_properties(place)
    return Device(known.name, int(known.L2_cache_size), int(known.total_memory))


def measure_ceilings(place: torch.device, timer: Timer, *, copy_bytes: int = COPY_BYTES, side: int = MATMUL_SIDE) -> Ceilings:
    """A copy reads and writes: 2 · copy_bytes. The product is torch's own, in bfloat16."""
    source = torch.zeros(copy_bytes, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    copy_s = statistics.median(timer.times_s([lambda: target.copy_(source)], REPEATS)[0])
    a, b = (torch.randn(side, side, device=place).bfloat16() for _ in range(2))
    matmul_s = statistics.median(timer.times_s([lambda: a @ b], REPEATS)[0])
    return Ceilings(2 * copy_bytes / copy_s, 2 * side**3 / matmul_s)
