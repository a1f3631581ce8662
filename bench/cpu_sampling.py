"""How long drawing takes beside a step: 32 rows of 49,152 made-up logits, by numpy and by the C++ library in turns.

`python -m bench.cpu_sampling [--spread 3]`: standard deviation of the logits; the smaller, the more tokens a filter leaves. Wall time of
all threads, and processor time of them. Wants a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench import result
from bench.result import Metric, Result
from replica.config import EngineConfig
from replica.contract.messages import SamplingParams
from replica.forward import CpuForward
from replica.runner import ModelRunner
from replica.sampler import Best, sample
from replica.step import Draw

ROWS = 32
REPEATS = 15
MOST_MS = 1.0
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_k_40": {"temperature": 0.8, "top_k": 40},
    "top_p_0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_k_50_top_p_0.95": {"temperature": 1.0, "top_k": 50, "top_p": 0.95},
    "min_p_0.05": {"temperature": 1.0, "min_p": 0.05},
}


def measure(forward: CpuForward, spread: float) -> list[Metric]:
    logits = torch.randn(ROWS, forward.decoder.vocab_size, generator=torch.Generator().manual_seed(0)) * spread
    values, tokens = logits.max(dim=-1)
    best = Best(tokens.numpy(), values.numpy())
    metrics = []
    for name, asked in ASKED.items():
        draws = [Draw(SamplingParams(seed=i, max_tokens=1, **asked), 0, [1] * 50, [2] * i) for i in range(ROWS)]
        by_numpy, by_library = in_turns(*(partial(sample, logits, draws, frozenset(), best, drawer) for drawer in (None, forward.draw)))
        metrics.append(result.plain(f"{name}.numpy", by_numpy[0], f"ms, {by_numpy[1]:.2f} of processors"))
        metrics.append(result.at_most(f"{name}.library", by_library[0], MOST_MS, f"ms, {by_library[1]:.2f} of processors"))
    return metrics


def in_turns(*calls: Callable[[], object]) -> list[tuple[float, float]]:
    """Of each call the median of its wall times and of its processor times, ms."""
    times: list[list[tuple[float, float]]] = [[] for _ in calls]
    for _ in range(REPEATS + 1):
        for call, taken in zip(calls, times, strict=True):
            wall, processors = time.perf_counter(), time.process_time()
            call()
            taken.append((time.perf_counter() - wall, time.process_time() - processors))
    return [tuple(1e3 * statistics.median(each) for each in zip(*taken[1:], strict=True)) for taken in times]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spread", type=float, default=3.0)
    options = parser.parse_args()
    runner = ModelRunner(EngineConfig.model_validate({"dtype": "bfloat16", "num_threads": len(os.sched_getaffinity(0))}))
    if not isinstance(runner.forward_pass, CpuForward):
        raise SystemExit(f"no C++ step to measure: {runner.kernels}")
    outcome = Result(
        "cpu-sampling",
        {"kernels": runner.kernels, "spread": str(options.spread)},
        metrics=tuple(measure(runner.forward_pass, options.spread)),
    )
    result.show(outcome)
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
