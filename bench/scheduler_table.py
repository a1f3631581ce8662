"""What the scheduler and the KV manager do and cost, without a model: steps, tokens, CPU per running request.

Steps and tokens are exact and the same on every machine. `iteration` is plain FCFS by iteration: in the cases of the recompute
tax it takes vLLM's steps and tokens one for one, so it stands for vLLM in the others too.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bench import result
from bench.result import Metric, Result
from replica.config import EngineConfig
from replica.contract.messages import Bounce, EngineLimits, GenerateRequest, SamplingParams, StepTimeCoefficients
from replica.contract.step_time import predict_step_s
from replica.engine import Engine
from replica.mock_runner import MockRunner
from replica.step import Step

Batching = Literal["adaptive", "iteration"]
VOCAB = 32_000
GPU = StepTimeCoefficients(a=8e-3, b=5e-5, c=2e-5, d=4e-8)  # an 8B-class model: 8 ms a step, 20,000 prompt tokens a second
SMALL_CPU = StepTimeCoefficients(a=15e-3, b=6e-4, c=1e-3, d=1e-7)  # the order of a 135M model on two cores
FRACTIONS = {0.8: (14.8, 737), 0.6: (23.0, 946), 0.4: (21.8, 1092)}  # of the KV needed: vLLM's tax in %, vLLM's steps
REQUESTS, PROMPT, OUTPUT = 64, 512, 512
BLOCK = 16


@dataclass(slots=True)
class Bench:
    """An engine over a mock runner, driven step by step; remembers what every step was."""

    blocks: int
    seqs: int = 64
    budget: int = 2048
    batching: Batching = "adaptive"
    by_priority: bool = False
    steps: list[Step] = field(default_factory=list)
    planning_s: list[float] = field(default_factory=list)  # CPU seconds of this thread
    engine: Engine = field(init=False)
    runner: MockRunner = field(init=False)
    _attempts: int = 0

    def __post_init__(self) -> None:
        limits = EngineLimits(
            max_model_len=8192,
            max_num_seqs=self.seqs,
            max_num_batched_tokens=self.budget,
            num_blocks=self.blocks,
            block_size=BLOCK,
            max_waiting=4096,
            vocab_size=VOCAB,
        )
        self.runner = MockRunner(limits)
        order: Literal["fcfs", "priority"] = "priority" if self.by_priority else "fcfs"
        config = EngineConfig(batching=self.batching, scheduling_policy=order, inter_token_slo_ms=1e6)
        self.engine = Engine(self.runner, config, "mock", "", time.perf_counter)

    def add(self, prompt: Sequence[int], max_tokens: int, *, priority: int = 0, known: bool = True) -> Bounce | None:
        """`known`: it cannot end before max_tokens, so the scheduler may count on its length."""
        self._attempts += 1
        sampling = SamplingParams(seed=self._attempts, max_tokens=max_tokens, ignore_eos=known)
        number = self._attempts
        return self.engine.submit(0, GenerateRequest(number, str(number), 0, tuple(prompt), (), sampling, priority=priority))

    def step(self) -> None:
        began = time.thread_time()
        step = self.engine.plan()
        planned = time.thread_time()
        assert step is not None
        answer = self.runner.execute(step)
        executed = time.thread_time()
        self.engine.settle(step, answer)
        self.planning_s.append(time.thread_time() - executed + planned - began)
        self.steps.append(step)

    def run(self) -> int:
        """Until all have ended; the number of steps."""
        before = len(self.steps)
        while self.engine.has_work:
            self.step()
        return len(self.steps) - before

    def first_step(self, request: int) -> int:
        """Steps that ran before the first with a row of this request (numbers count from 0)."""
        return next(i for i, step in enumerate(self.steps) if any(row.request == request for row in step.rows))


def prompt(seed: int, length: int) -> list[int]:
    return [3 + (seed * 7919 + i * 104_729 + i * i * 31) % (VOCAB - 3) for i in range(length)]


def decoding(running: int) -> Bench:
    """`running` requests, all of them past their prompt."""
    bench = Bench(blocks=running * 256, seqs=running)  # room for all that they may grow to
    for i in range(running):
        bench.add(prompt(i, 64), 4000)
    while any(request.remaining > 1 for request in bench.engine.roster.running) or len(bench.engine.roster.waiting):
        bench.step()
    assert len(bench.engine.roster.running) == running, "some ended before all had begun"
    return bench


def cost_s(running: int, steps: int) -> float:
    """CPU seconds of planning and settling a step of `running` decodes: the median over periods in which everyone fills one block.

    A step in which nobody needs a page or has a block to name would be cheaper, and few are so where many run.
    """
    bench = decoding(running)
    frozen_before = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()  # as a replica does when it is ready
    periods = []
    for _ in range(max(1, steps // BLOCK)):
        bench.planning_s.clear()
        for _ in range(BLOCK):
            bench.step()
            bench.steps.clear()  # what a step was is not kept here: it would be timed by the garbage collector
        periods.append(sum(bench.planning_s) / BLOCK)
    if not frozen_before:  # what a caller has frozen stays so
        gc.unfreeze()
    return statistics.median(periods)


def overloaded_s(steps: int) -> float:
    """Median seconds per running request of a step while 300 requests wait that do not fit the pool."""
    bench = Bench(blocks=4096, seqs=512)
    for i in range(556):
        bench.add(prompt(i, 64 if i < 256 else 256), 1000, known=False)
    for _ in range(60):
        bench.step()
    bench.planning_s.clear()
    for _ in range(steps):
        bench.step()
        bench.steps.clear()  # what a step was is not kept here: it would be timed by the garbage collector
    assert len(bench.engine.roster.waiting) >= 300
    return statistics.median(bench.planning_s) / len(bench.engine.roster.running)


def report_s(running: int, times: int) -> float:
    """Median seconds of a load report, which goes out with every step."""
    bench = decoding(running)
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        bench.engine.load()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def cpu_metrics(steps: int) -> list[Metric]:
    seconds = {running: min(cost_s(running, steps) for _ in range(3)) for running in (16, 64, 256, 1024)}
    each = {running: 1e6 * value / running for running, value in seconds.items()}
    return [
        result.plain("cpu.per_running_request.16", each[16], "µs"),
        result.plain("cpu.per_running_request.64", each[64], "µs"),
        result.at_most("cpu.per_running_request.256", each[256], 5.0, "µs"),
        result.plain("cpu.per_running_request.1024", each[1024], "µs"),
        result.at_most("cpu.per_running_request.1024_over_16", each[1024] / each[16], 1.25, "×"),
        result.at_most("cpu.step_of_64", 1e3 * seconds[64], 0.35, "ms"),
        result.at_most("cpu.per_running_request.overloaded", 1e6 * overloaded_s(min(steps, 150)), 5.0, "µs"),
        result.plain("cpu.load_report_of_64", 1e3 * report_s(64, steps), "ms"),
    ]


def behind_a_head(batching: Batching) -> tuple[int, int]:
    """Four 64-token requests behind a 2,400-token head, 99 free blocks: steps they wait, and steps the head waits."""
    bench = Bench(blocks=160, batching=batching)
    bench.add(prompt(0, 960), 16 * 36)  # 61 blocks at first
    bench.step()
    bench.add(prompt(1, 2400), 1)
    for i in range(4):
        bench.add(prompt(2 + i, 64), 4)
    bench.run()
    return max(bench.first_step(2 + i) for i in range(4)) - 1, bench.first_step(1) - 1


def urgent_wait(batching: Batching) -> int:
    """Priority 0 behind two runners of priority 10 in two slots: steps it waits."""
    bench = Bench(blocks=1024, seqs=2, batching=batching, by_priority=True)
    for i in range(2):
        bench.add(prompt(i, 32), 300, priority=10)
    bench.step()
    bench.add(prompt(2, 32), 4, priority=0)
    bench.run()
    return bench.first_step(2) - 1


def refused_at_once() -> bool:
    """A 4,000-token prompt in a pool of 1,600."""
    return Bench(blocks=100).add(prompt(0, 4000), 8) is not None


def recomputed_of_a_full_hit() -> int:
    bench = Bench(blocks=256)
    bench.add(prompt(0, 256), 1)
    bench.run()
    before = bench.runner.tokens
    bench.add(prompt(0, 256), 1)
    bench.run()
    return bench.runner.tokens - before


def sharers(batching: Batching) -> tuple[int, int]:
    """Eight requests that share 1,024 tokens (+ 16 own) in one step: tokens computed, steps the last one is delayed."""
    bench = Bench(blocks=1024, batching=batching)
    for i in range(8):
        bench.add([*prompt(0, 1024), *prompt(1 + i, 16)], 1)
    bench.run()
    return bench.runner.tokens, max(bench.first_step(i) for i in range(8))


@dataclass(frozen=True, slots=True)
class Tax:
    """What a pool too small for everybody costs."""

    steps: int
    recomputed: int
    preemptions: int
    gpu_s: float
    cpu_s: float

    @property
    def percent(self) -> float:
        """Of all tokens computed."""
        return 100 * self.recomputed / (self.recomputed + REQUESTS * (PROMPT + OUTPUT - 1))


def recompute_tax(fraction: float, batching: Batching, *, known: bool) -> Tax:
    """64 requests of 512 + 512 tokens in `fraction` of the KV they need."""
    bench = Bench(blocks=int(REQUESTS * (PROMPT + OUTPUT) // 16 * fraction), batching=batching)
    for i in range(REQUESTS):
        bench.add(prompt(i, PROMPT), OUTPUT, known=known)
    steps = bench.run()
    return Tax(
        steps=steps,
        recomputed=bench.runner.tokens - REQUESTS * (PROMPT + OUTPUT - 1),
        preemptions=bench.engine.roster.preemptions,
        gpu_s=sum(modelled_s(GPU, step) for step in bench.steps),
        cpu_s=sum(modelled_s(SMALL_CPU, step) for step in bench.steps),
    )


def modelled_s(coefficients: StepTimeCoefficients, step: Step) -> float:
    prefill = sum(len(row.tokens) for row in step.rows if len(row.tokens) > 1)
    decodes = sum(len(row.tokens) == 1 for row in step.rows)
    context = sum(row.start + len(row.tokens) for row in step.rows)
    return predict_step_s(coefficients, prefill_tokens=prefill, decodes=decodes, context_tokens=context, prefill_context=0)


def tax_metrics() -> list[Metric]:
    """The bounds: half of vLLM's tax, in no more than vLLM's steps."""
    metrics: list[Metric] = []
    for fraction, (percent, steps) in FRACTIONS.items():
        for label, batching, known in (("known", "adaptive", True), ("unknown", "adaptive", False), ("iteration", "iteration", True)):
            tax = recompute_tax(fraction, "iteration" if batching == "iteration" else "adaptive", known=known)
            name = f"tax.{round(100 * fraction)}.{label}"
            bound = label == "known"
            metrics += [
                result.at_most(name, tax.percent, percent / 2, "%") if bound else result.plain(name, tax.percent, "%"),
                result.at_most(f"{name}.steps", tax.steps, steps, "steps") if bound else result.plain(f"{name}.steps", tax.steps, "steps"),
                result.plain(f"{name}.preemptions", tax.preemptions, ""),
                result.plain(f"{name}.modelled_gpu", tax.gpu_s, "s"),
                result.plain(f"{name}.modelled_cpu", tax.cpu_s, "s"),
            ]
    return metrics


def rule_metrics() -> list[Metric]:
    waited, head = behind_a_head("adaptive")
    plain_waited, plain_head = behind_a_head("iteration")
    computed, delayed = sharers("adaptive")
    return [
        result.at_most("behind_a_head.steps_waited", waited, 19, "steps"),
        result.at_most("behind_a_head.steps_of_the_head", head, plain_head, "steps"),
        result.plain("behind_a_head.steps_waited.iteration", plain_waited, "steps"),
        result.at_most("urgent.steps_waited", urgent_wait("adaptive"), 9, "steps"),
        result.plain("urgent.steps_waited.iteration", urgent_wait("iteration"), "steps"),
        result.at_least("never_fits.refused_at_once", float(refused_at_once()), 1, ""),
        result.at_most("full_hit.tokens_recomputed", recomputed_of_a_full_hit(), 1, "tokens"),
        result.at_most("sharers.tokens_computed", computed, 1152, "tokens"),
        result.at_most("sharers.steps_delayed", delayed, 2, "steps"),
        result.plain("sharers.tokens_computed.iteration", sharers("iteration")[0], "tokens"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="steps timed for each batch size")
    options = parser.parse_args()
    parts: tuple[Callable[[], list[Metric]], ...] = (lambda: cpu_metrics(options.steps), rule_metrics, tax_metrics)
    metrics = tuple(metric for part in parts for metric in part())
    measured = Result(name="scheduler-table", configuration={"runner": "mock", "block_size": "16", "budget": "2048"}, metrics=metrics)
    result.show(measured)
    return 0 if measured.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
