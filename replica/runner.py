"""Carries out steps with a real model: copies, forward pass, draws."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.batch import Int32
from kernels.cpu.pages import scrub
from kernels.ops import Operators, use_threads
from replica.config import EngineConfig
from replica.contract.messages import EngineLimits
from replica.device_sampler import sample_on_device
from replica.forward import Computed, Forward, last_tokens
from replica.held_model import OnStage, Stages, hold_model
from replica.parallel.group import SingleRank, TensorParallel
from replica.prompt_scores import score_prompt, scored_logits
from replica.rank_step import RankStep
from replica.sampler import NOT_FINITE, check_finite, sample
from replica.step import Outcome, Step, StepResult
from replica.step_inputs import StepInputs, build_inputs


class ModelRunner:
    """One rank of a model and its part of the KV pool. Rank 0 executes each step and draws; the others follow, and draw nothing.

    Construction reads the model and raises ModelError (one line for the user) when it cannot be served as configured;
    `on_stage(name, seconds)` hears of each stage as it ends. One caller at a time, from any thread.
    """

    def __init__(self, config: EngineConfig, *, tp: TensorParallel | None = None, on_stage: OnStage | None = None) -> None:
        self._tp: TensorParallel = SingleRank() if tp is None else tp
        self._threads = config.num_threads or len(os.sched_getaffinity(0))
        self._local = threading.local()
        _use_once(self._local, self._threads)
        stages = Stages(on_stage)
        self._held = held = hold_model(config, self._tp, stages)
        self._pool = held.pool
        self.model = config.served_model_name or held.files.name
        self.revision = held.files.revision
        self.fingerprint = held.files.fingerprint
        self._limits = EngineLimits(
            max_model_len=held.size.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_blocks=held.size.num_blocks,
            block_size=config.block_size,
            max_waiting=config.max_waiting,
            vocab_size=held.config.vocab_size,
        )

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._held.config.eos_token_ids

    @property
    def kv_block_bytes(self) -> int:
        """Of one block in all layers, over all ranks."""
        return self._held.size.block_bytes

    @property
    def forward_pass(self) -> Forward:
        """To be measured by itself."""
        return self._held.forward

    @property
    def kernels(self) -> str:
        """What computes, and why it: for people."""
        return self._held.kernels

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and KV."""
        return self._held.dtype

    @property
    def overlaps(self) -> bool:
        """A GPU computes what it was told to while the host goes on."""
        return self._pool.device.type != "cpu"

    def execute(self, step: Step) -> StepResult:
        return self.begin(step)()

    def begin(self, step: Step) -> Callable[[], StepResult]:
        """The forward pass; the call it returns draws, and waits for the logits where a GPU computes them."""
        return self.begin_told(step, build_inputs(step, self._limits.block_size) if step.rows else None)

    @torch.inference_mode()
    def begin_told(self, step: Step, inputs: StepInputs | None) -> Callable[[], StepResult]:
        """As `begin`. `inputs` are the step's, None where it has no rows."""
        _use_once(self._local, self._threads)
        self._copy_blocks([(copy.source, copy.target) for copy in step.copies])
        if inputs is None:
            return lambda: StepResult(step.step_id, ())
        computed = self._held.forward.compute(inputs)

        @torch.inference_mode()
        def end() -> StepResult:
            drawn = _draw(step, inputs, computed, self.eos_token_ids, self._held.operators)
            found = {**_broken(computed.hidden, inputs), **drawn}
            outcomes = []
            for index, row in enumerate(step.rows):
                outcome = found.get(index, Outcome())
                if outcome.error:
                    self._scrub(inputs.batch.tables[index])
                if row.score_from is not None:
                    first, last = int(inputs.first_tokens[index]), int(inputs.last_tokens[index])
                    scores = score_prompt(row, computed.hidden[first : last + 1], self._held.forward.logits)  # a collective, as in `follow`
                    outcome = Outcome(outcome.token, outcome.logprobs, scores, outcome.error)
                outcomes.append(outcome)
            return StepResult(step.step_id, tuple(outcomes))

        return end

    @torch.inference_mode()
    def follow(self, step: RankStep) -> None:
        """A rank above 0's part of a step: what rank 0 computes, in its order, but nothing is drawn."""
        _use_once(self._local, self._threads)
        self._copy_blocks(step.copies)
        inputs = step.inputs
        if inputs is None:
            return
        computed = self._held.forward.compute(inputs)
        drawing = dict(zip(inputs.drawing, check_finite(computed.logits), strict=True)) if inputs.drawing else {}
        for index, outcome in {**_broken(computed.hidden, inputs), **drawing}.items():
            if outcome.error:
                self._scrub(inputs.batch.tables[index])
        for index, score_from in step.scored:
            first, end = int(inputs.first_tokens[index]), int(inputs.last_tokens[index]) + 1
            start, draws = int(inputs.batch.starts[index]), index in inputs.drawing
            for _ in scored_logits(start, score_from, draws, computed.hidden[first:end], self._held.forward.logits):
                pass  # the collective alone: rank 0 reads them

    @torch.inference_mode()
    def forward(self, step: Step) -> Tensor:
        """Copies and forward pass alone: logits [rows that draw, V], float32. The step has a row."""
        _use_once(self._local, self._threads)
        self._copy_blocks([(copy.source, copy.target) for copy in step.copies])
        return self._held.forward.compute(build_inputs(step, self._limits.block_size)).logits

    def close(self) -> None:
        """Give the KV pool back; nothing can be executed afterwards. Idempotent."""
        self._held.forward.close()
        self._pool = torch.empty(0)

    def _scrub(self, table: Int32) -> None:
        """A masked position is multiplied by 0, and 0 · NaN is NaN: what a broken row left must not reach its pages' next owner."""
        scrub(self._pool, np.unique(table).tolist())

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._held.operators.copy_blocks(self._pool, copies)


def _use_once(thread: threading.local, count: int) -> None:
    """The number of compute threads belongs to the calling thread, and the engine's is not the one that built the runner."""
    if not getattr(thread, "threads_set", False):
        use_threads(count)
        thread.threads_set = True


def _draw(step: Step, inputs: StepInputs, computed: Computed, eos_token_ids: frozenset[int], operators: Operators) -> dict[int, Outcome]:
    """By row: on the device where `operators` have a sampler, else on the host."""
    if not inputs.drawing:
        return {}
    draws = [draw for index in inputs.drawing if (draw := step.rows[index].draw) is not None]
    if computed.best is None and operators.draws:
        drawn = sample_on_device(operators.sampling, computed.logits, draws, eos_token_ids)
    else:
        drawn = sample(computed.logits.cpu(), draws, eos_token_ids, computed.best, computed.drawer)
    return dict(zip(inputs.drawing, drawn, strict=True))


def _broken(hidden: Tensor, inputs: StepInputs) -> dict[int, Outcome]:
    """An error for each row that draws nothing and has a position that is not finite: no block of it may become findable.

    What is not finite at a position is so at all later ones, which attend to it: the last one tells.
    """
    if not inputs.quiet:
        return {}
    finite = hidden[last_tokens(inputs, inputs.quiet)].isfinite().all(dim=-1).tolist()
    return {row: Outcome(error=NOT_FINITE) for row, fine in zip(inputs.quiet, finite, strict=True) if not fine}
