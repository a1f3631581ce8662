"""How near the C++ step comes to the machine's limits: an engine in this process, made-up batches, no scheduler.

`python -m bench.cpu_step [--form bfloat16|w8a8|w4a8] [--kv-cache-dtype int8] [--memory-gb-s 28] [--operations-g-s 448]`. A step of B
sequences with one key each is its linear layers (and what little else there is); with 512 keys each, less that, its attention. The limit
of B tokens is the longer of reading the weights once and of their multiplications. The memory's speed is measured before and after (the
better counts) unless it is given: on a shared machine it drifts by a factor of two. `--operations-g-s` counts bfloat16, int8 does twice
as many. Wants a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable

import torch

from bench import result
from bench.replica_start import FORMS
from bench.result import Metric, Result
from replica.config import EngineConfig
from replica.contract.messages import SamplingParams
from replica.forward import CpuForward
from replica.runner import ModelRunner
from replica.step import Draw, Row, Step

LINEAR_LEAST_PERCENT = {1: 80, 8: 70, 32: 55}
ATTENTION_LEAST_PERCENT = 60
OUTSIDE_MAX_MS = 1.5
PREFILL_LEAST_TOKENS_S = 1300
REPEATS = 15
GREEDY = SamplingParams(seed=0, max_tokens=1, temperature=0.0)


class Batches:
    """Steps over pages scattered at random."""

    def __init__(self, runner: ModelRunner) -> None:
        self._block = runner.limits.block_size
        self._draw = random.Random(0)
        self._pages = list(range(runner.limits.num_blocks))
        self._draw.shuffle(self._pages)
        self._vocab = runner.limits.vocab_size

    def decodes(self, sequences: int, keys: int) -> Step:
        return Step(1, tuple(self._row(number, 1, keys - 1, number * -(-keys // self._block)) for number in range(sequences)))

    def chunk(self, tokens: int) -> Step:
        return Step(1, (self._row(0, tokens, 0, 0),))

    def _row(self, number: int, tokens: int, start: int, first_page: int) -> Row:
        needed = -(-(start + tokens) // self._block)
        ids = [self._draw.randrange(self._vocab) for _ in range(tokens)]
        return Row(number, ids, start, self._pages[first_page : first_page + needed], Draw(GREEDY, 0, [0] * (start + tokens), ()))


def median_ms(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


def memory_speed_gb_s() -> float:
    """Reading 512 MB with all threads, the best of some."""
    numbers = torch.ones(1 << 27)
    best = 0.0
    for _ in range(8):
        started = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.nbytes / 1e9 / (time.perf_counter() - started))
    return best


def measure(runner: ModelRunner, given_gb_s: float | None, operations_g_s: float) -> list[Metric]:
    memory_gb_s = given_gb_s or memory_speed_gb_s()
    forward = runner.forward_pass
    if not isinstance(forward, CpuForward):
        raise SystemExit(f"no C++ step to measure: {runner.kernels}")
    model, batches = forward.decoder.model, Batches(runner)
    parameters = model.parameters
    metrics = [result.plain("weights", model.nbytes / 1e6, "MB a step")]
    linear_ms = {}
    for sequences in LINEAR_LEAST_PERCENT:
        step = batches.decodes(sequences, 1)
        linear_ms[sequences] = median_ms(lambda step=step: runner.forward(step))  # type: ignore[misc]
    memory_gb_s = given_gb_s or max(memory_gb_s, memory_speed_gb_s())
    metrics.append(result.plain("memory", memory_gb_s, "GB/s"))
    for sequences, least in LINEAR_LEAST_PERCENT.items():
        taken = linear_ms[sequences]
        limit = 1e3 * max(model.nbytes / (memory_gb_s * 1e9), 2 * parameters * sequences / (operations_g_s * 1e9))
        metrics.append(result.plain(f"batch_{sequences}.tokens_per_s", 1e3 * sequences / taken, "tokens/s"))
        metrics.append(result.at_least(f"batch_{sequences}.of_limit", 100 * limit / taken, least, "%"))
    step = batches.decodes(32, 512)
    computed, executed = median_ms(lambda: runner.forward(step)), median_ms(lambda: runner.execute(step))
    bandwidth = 32 * 512 * runner.kv_block_bytes / runner.limits.block_size / (computed - linear_ms[32]) / 1e6
    metrics.append(result.at_least("attention_32x512.of_bandwidth", 100 * bandwidth / memory_gb_s, ATTENTION_LEAST_PERCENT, "%"))
    metrics.append(result.plain("batch_32x512.tokens_per_s", 32e3 / executed, "tokens/s"))
    metrics.append(result.at_most("outside_the_forward_pass_32", executed - computed, OUTSIDE_MAX_MS, "ms"))
    chunk = batches.chunk(min(400, runner.limits.max_num_batched_tokens))
    metrics.append(result.at_least("prefill_400", 400e3 / median_ms(lambda: runner.execute(chunk)), PREFILL_LEAST_TOKENS_S, "tokens/s"))
    return metrics


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=sorted(FORMS), default="bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "int8"), default="auto")
    parser.add_argument("--memory-gb-s", type=float, help="instead of measuring it")
    parser.add_argument("--operations-g-s", type=float, default=448, help="bfloat16, of all cores")
    options = parser.parse_args()
    config = {"dtype": "bfloat16", "quantization": FORMS[options.form], "num_threads": len(os.sched_getaffinity(0))}
    config["kv_cache_dtype"] = options.kv_cache_dtype
    runner = ModelRunner(EngineConfig.model_validate(config))
    operations = options.operations_g_s * (1 if FORMS[options.form] is None else 2)
    outcome = Result(
        f"cpu-step-{options.form}",
        {"kernels": runner.kernels, "operations_g_s": str(operations)},
        metrics=tuple(measure(runner, options.memory_gb_s, operations)),
    )
    result.show(outcome)
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
