"""What the processes of test_parallel.py run. Every function gets (rank, size, port, result queue)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch

from replica.contract.messages import EngineLimits, SamplingParams
from replica.parallel.broadcast import LeadingRunner, rank_main
from replica.parallel.card import card
from replica.parallel.group import RankGroup, TensorParallel, join_store, open_store
from replica.parallel.step_channel import GroupBroken
from replica.rank_step import RankStep
from replica.step import BlockCopy, Draw, Outcome, Row, RunnerLost, Step, StepResult

DEADLINE_S = 2.5
LIMITS = EngineLimits(
    max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, num_blocks=16, block_size=4, max_waiting=8, vocab_size=100
)


class ShardedSum:
    """A 'model': each rank adds (rank + 1) × its tokens; the sum over ranks is the token drawn, modulo the vocabulary."""

    limits = LIMITS
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, tp: TensorParallel) -> None:
        self.tp = tp
        self.seen: list[tuple[tuple[int, ...], tuple[int, ...], bool]] = []
        self.copies: list[tuple[int, int]] = []

    def forward(self, step: Step) -> torch.Tensor:
        for row in step.rows:
            pages = tuple(row.blocks[: -(-(row.start + len(row.tokens)) // LIMITS.block_size)])
            self.seen.append((tuple(row.tokens), pages, row.draw is not None))
        self.copies += [(copy.source, copy.target) for copy in step.copies]
        return self.add_up(step.step_id, [sum(row.tokens) for row in step.rows])

    def add_up(self, step_id: int, sums: list[int]) -> torch.Tensor:
        return self.tp.all_reduce(torch.tensor([float(value) * (self.tp.rank + 1) for value in sums]))

    def follow(self, step: RankStep) -> None:
        inputs = step.inputs
        assert inputs is not None
        sums = []
        for row, (first, last) in enumerate(zip(inputs.first_tokens, inputs.last_tokens, strict=True)):
            tokens = tuple(inputs.token_ids[first : last + 1].tolist())
            pages = inputs.batch.tables[row, : -(-(inputs.batch.starts[row] + len(tokens)) // LIMITS.block_size)]
            self.seen.append((tokens, tuple(pages.tolist()), row in inputs.drawing))
            sums.append(sum(tokens))
        self.copies += step.copies
        self.add_up(step.step_id, sums)

    def execute(self, step: Step) -> StepResult:
        sums = self.forward(step)
        outcomes = tuple(Outcome(token=int(value) % 100 if row.draw else None) for value, row in zip(sums, step.rows, strict=True))
        return StepResult(step.step_id, outcomes)

    def close(self) -> None:
        """Holds nothing."""


def two_steps() -> tuple[Step, Step]:
    draw = Draw(SamplingParams(seed=1, max_tokens=4), 0, [1, 2, 3], [])
    first = Step(1, (Row(7, [1, 2, 3, 4, 5], 0, [3, 9, 11], draw), Row(8, [6, 7], 0, [4], None)), (BlockCopy(2, 3),))
    second = Step(2, (Row(7, [50], 8, [3, 9, 12], draw), Row(9, list(range(60)), 0, list(range(15)), None)))
    return first, second


def join(rank: int, size: int, port: Any, join_timeout_s: float = 60.0, deadline_s: float = DEADLINE_S) -> RankGroup:
    torch.set_num_threads(1)
    if rank == 0:
        store = open_store("127.0.0.1", 20.0)
        with port.get_lock():
            port.value = store.port
    else:
        while not port.value:
            time.sleep(0.01)
        store = join_store("127.0.0.1", port.value, 20.0)
    return RankGroup(store, rank=rank, size=size, secret=b"of the group", deadline_s=deadline_s, join_timeout_s=join_timeout_s)


def collectives(rank: int, size: int, port: Any, results: Any) -> None:
    group = join(rank, size, port)
    reduced = group.all_reduce(torch.tensor([1.0 + rank, 10.0]))
    gathered = group.all_gather_last_dim(torch.full((2, 3), float(rank)))
    results.put((rank, reduced.tolist(), gathered.tolist(), gathered.is_contiguous()))
    group.close()


def steps(rank: int, size: int, port: Any, results: Any) -> None:
    group = join(rank, size, port)
    if rank == 0:
        model = ShardedSum(group)
        runner = LeadingRunner(model, group)
        tokens = [[outcome.token for outcome in runner.execute(step).outcomes] for step in two_steps()]
        time.sleep(DEADLINE_S + 0.5)  # idle for longer than a collective may take: nobody minds
        tokens.append([runner.execute(Step(3, two_steps()[0].rows)).outcomes[0].token])
        runner.close()
        results.put((rank, tokens, model.seen, model.copies))
    else:
        models: list[ShardedSum] = []

        def make(tp: TensorParallel) -> ShardedSum:
            models.append(ShardedSum(tp))
            return models[0]

        count = rank_main(group, make)
        results.put((rank, count, models[0].seen, models[0].copies))


class Failing(ShardedSum):
    def add_up(self, step_id: int, sums: list[int]) -> torch.Tensor:
        if self.tp.rank == 1 and step_id == 2:
            self.fail()
        return super().add_up(step_id, sums)

    def fail(self) -> None:
        raise MemoryError("this rank fails")


class Vanishing(Failing):
    def fail(self) -> None:
        os._exit(9)


class Hanging(Failing):
    def fail(self) -> None:
        time.sleep(DEADLINE_S + 8.0)


def losing(kind: type[Failing], rank: int, size: int, port: Any, results: Any) -> None:
    group = join(rank, size, port)
    started = 0.0
    try:
        if rank == 0:
            runner = LeadingRunner(kind(group), group)
            first, second = two_steps()
            runner.execute(first)
            started = time.monotonic()
            runner.execute(second)
        else:
            started = time.monotonic()
            rank_main(group, kind)
        results.put((rank, "finished", 0.0))
    except (RunnerLost, MemoryError) as error:
        results.put((rank, type(error).__name__, time.monotonic() - started))
        if rank == 0:
            try:
                runner.execute(first)
            except RunnerLost:
                results.put((rank, "still lost", 0.0))


def failing(rank: int, size: int, port: Any, results: Any) -> None:
    losing(Failing, rank, size, port, results)


def vanishing(rank: int, size: int, port: Any, results: Any) -> None:
    losing(Vanishing, rank, size, port, results)


def hanging(rank: int, size: int, port: Any, results: Any) -> None:
    losing(Hanging, rank, size, port, results)


def failing_to_load(rank: int, size: int, port: Any, results: Any) -> None:
    """A rank whose shard cannot be read: the others, already waiting for it, hear of it."""
    group = join(rank, size, port)

    def make(tp: TensorParallel) -> ShardedSum:
        if rank == 1:
            time.sleep(DEADLINE_S + 0.5)  # slow to load is no fault, whatever the collectives' deadline
            raise FileNotFoundError("no shard")
        return ShardedSum(tp)

    try:
        if rank == 0:
            LeadingRunner(make(group), group)
        else:
            rank_main(group, make)
    except (GroupBroken, FileNotFoundError) as error:
        results.put((rank, type(error).__name__, str(error)))


def disagreeing(rank: int, size: int, port: Any, results: Any) -> None:
    """Another file on rank 2: all are told, before anything is loaded."""
    group = join(rank, size, port, join_timeout_s=5.0)
    weights = "other" if rank == 2 else "same"
    if rank == 1:
        time.sleep(5.5)  # a rank that downloads the model comes later than joining may take: nobody minds
    try:
        group.agree(card(weights=weights, dtype=torch.float32, kernels="reference", num_blocks=1, block_size=16, max_model_len=16))
    except GroupBroken as error:
        results.put((rank, str(error)))


class FailsAtHome(ShardedSum):
    def add_up(self, step_id: int, sums: list[int]) -> torch.Tensor:
        if self.tp.rank == 0 and step_id == 2:
            raise ValueError("rank 0 fails before its collective")
        return super().add_up(step_id, sums)


def failing_at_home(rank: int, size: int, port: Any, results: Any) -> None:
    losing(FailsAtHome, rank, size, port, results)  # type: ignore[arg-type]


def incomplete(rank: int, size: int, port: Any, results: Any) -> None:
    """One rank too few comes: joining has a deadline."""
    if rank == size - 1:
        return
    try:
        join(rank, size, port, join_timeout_s=2.0)
    except GroupBroken as error:
        results.put((rank, str(error)))


def run(target: Callable[..., None], size: int, expect: int, timeout_s: float = 60.0) -> list[Any]:
    """Run `target` on `size` ranks; the first `expect` results, sorted. The processes have ended when it returns.

    They are forked from a process that has imported torch, and done nothing else: importing it is most of what they would do.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    port = context.Value("i", 0)
    results = context.Queue()
    processes = [context.Process(target=target, args=(rank, size, port, results), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        return sorted(results.get(timeout=timeout_s) for _ in range(expect))
    finally:
        for process in processes:
            process.join(timeout=0.5)
            if process.is_alive():
                process.kill()
                process.join()
