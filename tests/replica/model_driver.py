"""Drives a ModelRunner the way a scheduler would, without one: pages are handed out by hand, chunks cut at will."""

from __future__ import annotations

import random
from collections.abc import Sequence

from replica.contract.messages import SamplingParams, TokenLogprobs
from replica.runner import ModelRunner
from replica.step import BlockCopy, Draw, Outcome, Row, Step


def greedy(max_tokens: int = 16, **changes: object) -> SamplingParams:
    return SamplingParams(**{"seed": 0, "max_tokens": max_tokens, "temperature": 0.0, **changes})  # type: ignore[arg-type]


class Running:
    """One request: its tokens, its pages, how far it is computed."""

    def __init__(self, prompt: Sequence[int], sampling: SamplingParams, blocks: list[int], choice: int = 0) -> None:
        self.prompt = list(prompt)
        self.output: list[int] = []
        self.sampling = sampling
        self.blocks = blocks
        self.choice = choice
        self.computed = 0
        self.logprobs: list[TokenLogprobs | None] = []
        self.scores: list[TokenLogprobs | None] = []
        self.error = ""

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    def row(self, request: int, chunk: int) -> Row:
        new = self.tokens[self.computed : self.computed + chunk]
        draws = self.computed + len(new) == len(self.tokens)
        draw = Draw(self.sampling, self.choice, self.prompt, self.output) if draws else None
        return Row(request, new, self.computed, self.blocks, draw)

    def settle(self, row: Row, outcome: Outcome) -> None:
        self.computed += len(row.tokens)
        self.error = self.error or outcome.error
        if outcome.token is not None:
            self.output.append(outcome.token)
            self.logprobs.append(outcome.logprobs)


class Driver:
    """`shuffle` draws pages at random over the whole pool, so that neighbours in a sequence are strangers in memory."""

    def __init__(self, runner: ModelRunner, shuffle: int | None = None) -> None:
        self.runner = runner
        self._free = list(range(runner.limits.num_blocks))
        if shuffle is not None:
            random.Random(shuffle).shuffle(self._free)
        self._step = 0

    def add(self, prompt: Sequence[int], sampling: SamplingParams, choice: int = 0) -> Running:
        size = len(prompt) + sampling.max_tokens
        blocks = [self._free.pop() for _ in range(-(-size // self.runner.limits.block_size))]
        return Running(prompt, sampling, blocks, choice)

    def step(self, sequences: Sequence[Running], chunk: int = 1 << 20, copies: tuple[BlockCopy, ...] = ()) -> None:
        rows = tuple(sequence.row(number, chunk) for number, sequence in enumerate(sequences))
        self._step += 1
        result = self.runner.execute(Step(self._step, rows, copies))
        assert result.step_id == self._step
        for sequence, row, outcome in zip(sequences, rows, result.outcomes, strict=True):
            sequence.settle(row, outcome)

    def run(self, sequences: Sequence[Running], chunk: int = 1 << 20) -> list[list[int]]:
        """Until every sequence has its max_tokens, whatever tokens they are."""
        while alive := [one for one in sequences if len(one.output) < one.sampling.max_tokens and not one.error]:
            self.step(alive, chunk)
        return [one.output for one in sequences]

    def generate(self, prompt: Sequence[int], sampling: SamplingParams, *, chunk: int = 1 << 20, choice: int = 0) -> list[int]:
        return self.run([self.add(prompt, sampling, choice)], chunk)[0]
