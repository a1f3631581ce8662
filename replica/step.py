"""A step: what the scheduler decides and a runner carries out. Plain values; the scheduler knows no tensor, the runner no request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from replica.contract.messages import EngineLimits, SamplingParams, TokenLogprobs


class TokenMask(Protocol):
    """Which tokens a request may draw next, by a rule of its own (a grammar is one). What it raises fails that request alone."""

    def allowed(self, output_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        """[vocabulary] True: may follow `output_ids`, which is all of the output so far, also after a preemption or a move."""
        ...


@dataclass(frozen=True, slots=True)
class Draw:
    """Draw one token from the logits of a row's last position. Only the rank that samples reads it.

    `prompt_ids` and `output_ids` are the request's own lists, to be read only: the token drawn is for position
    len(prompt_ids) + len(output_ids), and randomness is a function of (sampling.seed, choice, that position).
    """

    sampling: SamplingParams
    choice: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    mask: TokenMask | None = None


class Row(msgspec.Struct, frozen=True, gc=False):  # made by the thousand a step: a sixth of a dataclass's time, unseen by the collector
    """One request's part of a step: compute `tokens` at positions start, start+1, … over the pages `blocks`.

    `blocks` covers positions 0 … start+len(tokens)-1 (page i holds positions i·block_size …); it is the request's own
    list and may be longer. It only grows at its end: other pages come as another list. Keys and values of positions < start
    are already in those pages.
    """

    request: int  # number of the request in this engine; stable while it lives, never reused
    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    draw: Draw | None = None  # None: a partial prefill, nothing is drawn
    score_from: int | None = None  # prompt logprobs wanted from this position on; 0 or > start: the logits before it are in this row
    score_top: int = 0  # how many alternatives with each scored position
    score_next: int | None = None  # the token that follows the row, scored with it: its logits are the last; never where the row draws


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy page `source` to page `target` in every layer, in order, before the forward pass."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Step:
    step_id: int
    rows: tuple[Row, ...]
    copies: tuple[BlockCopy, ...] = ()


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """What a row brought, in the order of Step.rows.

    `token` is None when the row draws nothing. `error` fails this request alone. `scores[i]` is the log probability of
    the token at position score_from + i given all before it, up to the row's end and `score_next` (None for the first of a prompt).
    """

    token: int | None = None
    logprobs: TokenLogprobs | None = None
    scores: tuple[TokenLogprobs | None, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class StepResult:
    step_id: int
    outcomes: tuple[Outcome, ...]


class RunnerLost(Exception):
    """The runner can carry out no further step (a rank is gone, the device failed): the engine ends, the replica is replaced."""


class Runner(Protocol):
    """Carries out steps, one at a time, in order. May raise: then nothing of the step counts; RunnerLost: it never will again."""

    @property
    def limits(self) -> EngineLimits:
        """What this runner's model and KV pool can hold."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def execute(self, step: Step) -> StepResult: ...

    def close(self) -> None: ...


@runtime_checkable
class AsynchronousRunner(Protocol):
    """A Runner whose device may compute by itself meanwhile."""

    @property
    def overlaps(self) -> bool:
        """Whether it does; else `begin` computes before it returns."""
        ...

    def begin(self, step: Step) -> Callable[[], StepResult]:
        """Tell the device what to do; the call it returns waits for the result, and must be made before the next `begin`."""
        ...
