"""The forward pass of a step, whatever computes it: torch's operators or the step in C++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch import CacheLayout
from kernels.cpu.abi import DRAW
from kernels.cpu.decoder import Decoder
from kernels.ops import Operators
from replica.models.llama import Llama
from replica.sampler import Best, Drawer, Logits
from replica.step import Draw
from replica.step_inputs import StepInputs

SEED_MASK = (1 << 64) - 1  # the noise is a function of a seed's low 64 bits


@dataclass(frozen=True, slots=True)
class Computed:
    """Of a step, float32: hidden states [T, H], and the logits [drawing rows, V] of these rows' last tokens."""

    hidden: Tensor
    logits: Tensor
    best: Best | None = None  # of the logits, where finding it came with computing them
    drawer: Drawer | None = None  # where one came with what computes


class Forward(Protocol):
    """A model on this rank with its part of the KV pool."""

    def compute(self, inputs: StepInputs) -> Computed:
        """Writes keys and values of the step's tokens."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, H] → logits [n, V], float32."""
        ...

    def close(self) -> None:
        """Nothing is computed afterwards. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class TorchForward:
    model: Llama
    operators: Operators
    layout: CacheLayout
    dtype: torch.dtype
    device: torch.device
    pool: Tensor

    def compute(self, inputs: StepInputs) -> Computed:
        plans = {
            window: self.operators.plan_attention(inputs.batch, self.layout, self.dtype, self.device, window)
            for window in dict.fromkeys(self.model.config.layer_windows)
        }
        token_ids = torch.from_numpy(inputs.token_ids).to(self.device)
        positions = torch.from_numpy(inputs.positions).to(self.device)
        hidden = self.model.forward(token_ids, positions, self.pool, plans)
        if not inputs.drawing:
            return Computed(hidden, hidden.new_empty((0, self.model.config.vocab_size)))
        if len(inputs.drawing) == hidden.shape[0]:
            return Computed(hidden, self.model.logits(hidden))
        return Computed(hidden, self.model.logits(hidden[last_tokens(inputs, inputs.drawing)]))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class CpuForward:
    """A token's logits are the same bits in every batch, chunk and order of computing."""

    decoder: Decoder

    def compute(self, inputs: StepInputs) -> Computed:
        wanted = inputs.last_tokens[list(inputs.drawing)].astype(np.int32)
        done = self.decoder.step(inputs.token_ids, inputs.batch, wanted)
        return Computed(done.hidden, done.logits, Best(done.best, done.best_logits), self.draw)

    def draw(self, logits: Logits, best: Best, rows: Sequence[int], draws: Sequence[Draw]) -> npt.NDArray[np.int64]:
        """As sampler.Drawer."""
        asked = [(row, best.tokens[row], *_asked(draws[row]), best.logits[row]) for row in rows]
        return self.decoder.draw(logits, np.array(asked, DRAW))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)

    def close(self) -> None:
        self.decoder.close()


def _asked(draw: Draw) -> tuple[float, ...]:
    s, length = draw.sampling, len(draw.prompt_ids) + len(draw.output_ids)
    return s.seed & SEED_MASK, draw.choice, length, s.top_k, s.temperature, s.top_p, s.min_p


def last_tokens(inputs: StepInputs, rows: Sequence[int]) -> list[int]:
    """Places of these rows' last tokens in the packed batch."""
    places: list[int] = inputs.last_tokens[list(rows)].tolist()
    return places
