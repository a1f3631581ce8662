"""Two and four ranks of every architecture say in float32 what one says, and only rank 0 decides what that is (FLO-11)."""

from __future__ import annotations

import dataclasses
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replica.config import EngineConfig
from replica.contract.model_error import ModelError
from replica.forward import Computed
from replica.parallel.broadcast import LeadingRunner
from replica.parallel.step_channel import GroupBroken
from replica.rank_step import RankStep
from replica.runner import ModelRunner
from replica.step import Step, StepResult
from replica.step_inputs import StepInputs, build_inputs
from tests.replica.model_driver import Driver, greedy
from tests.replica.step_wire import assert_equal
from tests.replica.thread_ranks import lead
from tests.replica.tiny_families import FAMILIES, write_family
from tests.replica.tiny_llama import write_tiny_llama

PROMPTS = [[(7 * i * i + 3 * i) % 130 + 1 for i in range(length)] for length in (40, 17, 1)]
HEADS = {"num_attention_heads": 8, "hidden_size": 64}  # two KV heads: four ranks hold each of them twice


def config_of(directory: Path, size: int) -> EngineConfig:
    return EngineConfig(model=str(directory), dtype="float32", num_gpu_blocks_override=64, num_threads=1, tensor_parallel_size=size)


def answers(runner: Any, **sampling: Any) -> list[list[int]]:
    """Ids of three requests that run together, their prompts in chunks."""
    driver = Driver(runner, shuffle=3)
    return driver.run([driver.add(prompt, greedy(14, **sampling)) for prompt in PROMPTS], chunk=11)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_and_four_ranks_say_what_one_says(tmp_path: Path, family: str) -> None:
    directory = write_family(tmp_path, family, **HEADS)
    alone = answers(ModelRunner(config_of(directory, 1)))
    for size in (2, 4):
        assert lead(size, lambda tp, size=size: ModelRunner(config_of(directory, size), tp=tp), answers) == alone, size


def test_ranks_that_share_a_kv_head_hold_it_whole(tmp_path: Path) -> None:
    directory = write_family(tmp_path, "llama", **HEADS)
    shapes: dict[int, tuple[int, ...]] = {}

    def make(tp: Any) -> ModelRunner:
        runner = ModelRunner(config_of(directory, 4), tp=tp)
        shapes[tp.rank] = tuple(runner._pool.shape)
        return runner

    lead(4, make, lambda runner: None)
    assert set(shapes.values()) == {(3, 64, 2, 1, 16, 8)}


def test_sizes_that_do_not_divide_name_those_that_do(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path)  # 6 heads, 3 KV heads, 132 tokens
    for size, reason in (
        (2, r"KV heads \(3\)"),
        (5, r"attention heads \(6\), KV heads \(3\), feed-forward width \(96\), vocabulary \(132\)"),
    ):
        with pytest.raises(ModelError, match=rf"tensor_parallel_size {size} does not divide {reason}; sizes that work: 1, 3, 6$"):
            lead(size, lambda tp, size=size: ModelRunner(config_of(directory, size), tp=tp), answers)


def test_ranks_that_read_other_weights_are_refused(tmp_path: Path) -> None:
    """The control: the same weights in two places are the same."""
    places = {seed: write_tiny_llama(tmp_path / str(seed), seed=seed) for seed in (0, 1)}
    copy = write_tiny_llama(tmp_path / "copy", seed=0)
    with pytest.raises(GroupBroken, match=r"^rank 2 differs from rank 0: weights '\w+' \(rank 0: '\w+'\)$"):
        lead(3, lambda tp: ModelRunner(config_of(places[int(tp.rank == 2)], 3), tp=tp), answers)
    assert lead(3, lambda tp: ModelRunner(config_of(copy if tp.rank == 2 else places[0], 3), tp=tp), lambda runner: "same") == "same"


class NoisyForward:
    """A rank's own copy of the logits is not quite that of the others, and its random numbers are its own."""

    def __init__(self, inner: Any, rank: int, drawn: list[int]) -> None:
        self.inner, self.drawn = inner, drawn
        self.generator = torch.Generator().manual_seed(rank)

    def compute(self, inputs: Any) -> Computed:
        done = self.inner.compute(inputs)
        noisy = done.logits + 1e-6 * torch.randn(done.logits.shape, generator=self.generator)
        if len(noisy):  # what this rank would have drawn by itself
            self.drawn += torch.multinomial((noisy / 1.5).softmax(-1), 1, generator=self.generator)[:, 0].tolist()
        return Computed(done.hidden, noisy)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner.logits(hidden)

    def close(self) -> None:
        self.inner.close()


def check_sum(step_id: int, inputs: StepInputs) -> int:
    """Over step id, tokens, positions, and the pages that are used."""
    columns = (inputs.token_ids, inputs.positions, inputs.batch.counts, inputs.batch.tables)
    return zlib.crc32(repr((step_id, *(column.tolist() for column in columns))).encode())


def test_ranks_with_a_will_of_their_own_change_nothing(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path)
    sampling = {"temperature": 1.5, "seed": 12345}
    alone = answers(ModelRunner(config_of(directory, 1)), **sampling)
    seen: dict[int, list[int]] = {}
    drawn: dict[int, list[int]] = {}

    class Watched(ModelRunner):
        def begin_told(self, step: Step, inputs: StepInputs | None) -> Callable[[], StepResult]:
            assert inputs is not None
            assert_equal(inputs, build_inputs(step, self.limits.block_size))
            seen.setdefault(0, []).append(check_sum(step.step_id, inputs))
            return super().begin_told(step, inputs)

        def follow(self, step: RankStep) -> None:
            assert step.inputs is not None
            seen.setdefault(self._tp.rank, []).append(check_sum(step.step_id, step.inputs))
            super().follow(step)

    def make(tp: Any) -> ModelRunner:
        torch.manual_seed(tp.rank)
        runner = Watched(config_of(directory, 3), tp=tp)
        if tp.rank:
            noisy = NoisyForward(runner._held.forward, tp.rank, drawn.setdefault(tp.rank, []))
            runner._held = dataclasses.replace(runner._held, forward=noisy)
        return runner

    def work(runner: LeadingRunner) -> list[list[int]]:
        assert threading.active_count() >= 3
        return answers(runner, **sampling)

    assert lead(3, make, work) == alone
    assert len(seen[0]) > 14
    assert seen[0] == seen[1] == seen[2]
    assert drawn[1] != drawn[2]  # the control: left to themselves, the ranks would have followed different histories
