"""How long a kernel takes: medians of graph replays over inputs that the L2 has forgotten."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from bench.kernels.subject import Ground, Subject

REPEATS = 25
COPIES_MAX = 48
L2_TIMES = 3  # inputs are rotated over so many times the L2
WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    l2_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured in the same call: what the machine gives at best."""

    copy_bytes_per_s: float
    matmul_operations_per_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    name: str
    median_s: float
    graphed: bool  # False: the launcher cannot be captured, its host time counts
    bandwidth: float  # bytes moved ÷ time, as a fraction of the copy's
    arithmetic: float  # operations ÷ time, as a fraction of the matrix product's


class Timer(Protocol):
    """Times calls on a device. `times_s` runs all `calls` in order, `repeats` times, and tells the seconds of one call on average for
    each repeat, and whether they were replayed from a graph."""

    def times_s(self, calls: Sequence[Callable[[], object]], repeats: int) -> tuple[list[float], bool]: ...


class DeviceTimer:
    """By CUDA events around the replay of one graph of all calls; eagerly where a call cannot be captured."""

    def times_s(self, calls: Sequence[Callable[[], object]], repeats: int) -> tuple[list[float], bool]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:  # compiles, fills caches of tiles
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        replay, graphed = _captured(calls)
        for _ in range(WARM_UPS):
            replay()
        return [_timed(replay) / len(calls) for _ in range(repeats)], graphed


def _captured(calls: Sequence[Callable[[], object]]) -> tuple[Callable[[], object], bool]:
    graph = torch.cuda.CUDAGraph()
    kept: list[object] = []  # what the graph writes to
    try:
        with torch.cuda.graph(graph):
            kept += [call() for call in calls]
    except Exception:
        torch.cuda.synchronize()
        return lambda: [call() for call in calls], False

    def replay() -> list[object]:
        graph.replay()
        return kept

    return replay, True


def _timed(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def copies_of(bytes_moved: int, device: Device) -> int:
    """How many sets of inputs there must be so that none is still in the L2 when its turn comes again; they fit half the memory."""
    wanted = -(-L2_TIMES * device.l2_bytes // max(bytes_moved, 1))
    fitting = device.memory_bytes // 2 // max(3 * bytes_moved, 1)
    return max(1, min(wanted, COPIES_MAX, fitting))


def measure(subject: Subject, place: torch.device, device: Device, ceilings: Ceilings, timer: Timer) -> Measured:
    calls = [subject.build(Ground(place, seed)) for seed in range(copies_of(subject.cost.bytes_moved, device))]
    times, graphed = timer.times_s(calls, REPEATS)
    median_s = statistics.median(times)
    return Measured(
        subject.name,
        median_s,
        graphed,
        subject.cost.bytes_moved / median_s / ceilings.copy_bytes_per_s,
        subject.cost.operations / median_s / ceilings.matmul_operations_per_s,
    )
