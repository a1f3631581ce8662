"""Before a replica says it is ready it runs a few made-up requests, so that the first real one meets a warm, known engine.

Twice: the first pass pays for what a runner does only once (memory touched; on a device kernels compiled and steps recorded,
for each shape), the second is timed. Where nothing depends on the shape the first is brief. What is learned is the step-time
model; the engine that ran it is thrown away, so that no block, counter or event of a made-up request is ever seen. A replica that
is told what steps of one like it take, because it takes that one's place, times none, and touches its memory only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from replica.config import EngineConfig
from replica.contract.blocks import block_keys, root_key
from replica.contract.messages import EngineLimits, GenerateRequest, SamplingParams, StepTimeCoefficients
from replica.engine import Engine
from replica.step import AsynchronousRunner, Runner
from replica.step_time_fit import StepTimeFit

TIME_MAX_S = 5.0  # for each pass, looked at between rounds: a big model on a small machine is not held up for long
_OWNER = 0
_MODEL = "warm-up"


@dataclass(frozen=True, slots=True)
class Round:
    """`requests` at once, each with a prompt of `prompt_tokens` and `output_tokens` to draw."""

    requests: int
    prompt_tokens: int
    output_tokens: int


def rounds(limits: EngineLimits) -> tuple[Round, ...]:
    """Steps of different shapes, within the limits: few and many decodes, short and long chunks, chunks far into a context."""
    budget, many = limits.max_num_batched_tokens, limits.max_num_seqs
    wanted = (
        Round(1, 2 * budget + 16, 4),
        Round(1, 16, 8),
        Round(min(8, many), 96, 8),
        Round(min(32, many), 24, 6),
        Round(1, budget // 2, 2),
    )
    return _fitting(wanted, limits)


def touches(limits: EngineLimits) -> tuple[Round, ...]:
    """A chunk and decodes, each as little as there is of its kind."""
    return _fitting((Round(1, 16, 2), Round(min(8, limits.max_num_seqs), 16, 2)), limits)


def _fitting(wanted: Sequence[Round], limits: EngineLimits) -> tuple[Round, ...]:
    room = limits.max_model_len - 1
    fitting = (Round(r.requests, max(1, min(r.prompt_tokens, room - r.output_tokens)), r.output_tokens) for r in wanted)
    return tuple(r for r in fitting if r.prompt_tokens + r.output_tokens <= room)


def brief(whole: Sequence[Round]) -> tuple[Round, ...]:
    """The same kinds of steps, with about half to compute."""
    return tuple(Round(r.requests, max(1, r.prompt_tokens // 2), min(3, r.output_tokens)) for r in whole)


def warm_up(runner: Runner, config: EngineConfig, clock: Callable[[], float], known: StepTimeCoefficients | None = None) -> StepTimeFit:
    """What the steps of `runner` take; `known`: what those of one like it took, which is believed until real requests say otherwise.

    Raises what the runner raises as RunnerLost; other faults show when real requests come.
    """
    draw = random.Random(0)
    whole = rounds(runner.limits)
    has_shapes = isinstance(runner, AsynchronousRunner) and runner.overlaps
    if known is not None:
        _run(runner, config, clock, draw, whole if has_shapes else touches(runner.limits))
        return StepTimeFit(known)
    _run(runner, config, clock, draw, whole if has_shapes else brief(whole))
    return _run(runner, config, clock, draw, whole)


def _run(runner: Runner, config: EngineConfig, clock: Callable[[], float], draw: random.Random, asked: Sequence[Round]) -> StepTimeFit:
    engine = Engine(runner, config, _MODEL, "", clock)
    started_s = clock()
    attempt = 0
    for each in asked:
        if clock() - started_s > TIME_MAX_S:
            break
        for _ in range(each.requests):
            attempt += 1
            engine.submit(_OWNER, _request(attempt, each, engine.limits, draw))
        while engine.has_work and engine.step() is not None:
            pass
    return engine.step_time


def _request(attempt: int, shape: Round, limits: EngineLimits, draw: random.Random) -> GenerateRequest:
    prompt = tuple(draw.randrange(limits.vocab_size) for _ in range(shape.prompt_tokens))
    return GenerateRequest(
        attempt=attempt,
        request_id=f"{_MODEL}-{attempt}",
        choice=0,
        prompt_ids=prompt,
        block_keys=block_keys(root_key(model=_MODEL, revision=""), prompt, limits.block_size),
        sampling=SamplingParams(seed=0, max_tokens=shape.output_tokens, temperature=0.0, ignore_eos=True),
    )
