"""One table of requests, and the situations in which an engine may have to answer them: the ids must be the same in all.

Every situation runs a fresh engine over a real runner whose pool still holds what others left there, and says what makes it
worth running (hits, preemptions, …) so that a test can be sure that it happened.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from safetensors import safe_open

from replica.config import EngineConfig
from replica.contract.messages import EngineLimits, GenerateRequest, SamplingParams
from replica.contract.model_files import resolve
from replica.engine import Engine
from replica.intake import MaskOf
from replica.models.config import read_model_config
from replica.runner import ModelRunner
from replica.step import Step, StepResult

BLOCK = 4
Answers = list[tuple[int, ...]]


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    sampling: SamplingParams
    choice: int = 0
    emitted: tuple[int, ...] = ()


def ids(seed: int, length: int) -> tuple[int, ...]:
    return tuple((seed * 37 + 7 * i * i + 3 * i) % 128 + 3 for i in range(length))


def asked(prompt: tuple[int, ...], max_tokens: int, choice: int = 0, **changes: Any) -> Asked:
    fields = {"seed": 11, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **changes}
    return Asked(prompt, SamplingParams(**fields), choice)


SHARED = ids(1, 24)
RULES = {"repetition_penalty": 1.3, "presence_penalty": 4.0, "frequency_penalty": 3.0}
TABLE: tuple[Asked, ...] = (
    asked((5,), 10),
    asked(SHARED, 14),  # whole blocks
    asked(SHARED + ids(2, 5), 9, temperature=1.1, seed=3),
    asked(SHARED + ids(2, 5), 9, choice=1, temperature=1.1, seed=3),
    asked(SHARED[:13] + ids(3, 30), 14, allowed_token_ids=tuple(range(20, 26)), **RULES),  # would repeat itself
    asked(ids(4, 37), 12, temperature=0.9, top_p=0.9, top_k=30, seed=-4, **RULES),
    asked(ids(5, 9), 16, temperature=1.5, min_p=0.02, logit_bias=((7, 3.0), (9, -4.0)), bad_words=((8,), (7, 7))),
    asked(ids(6, 18), 11, ignore_eos=False, min_tokens=4, stop_token_ids=tuple(range(3, 60)), temperature=1.0),
)


@dataclass(frozen=True)
class Setting:
    """How an engine is set up: `engine` as in EngineConfig."""

    blocks: int = 120
    budget: int = 64
    seqs: int = 16
    engine: tuple[tuple[str, Any], ...] = ()


class Narrowed:
    """The runner with limits of this setting."""

    def __init__(self, runner: ModelRunner, setting: Setting) -> None:
        self._runner = runner
        self.eos_token_ids = runner.eos_token_ids
        self.limits: EngineLimits = msgspec.structs.replace(
            runner.limits, num_blocks=setting.blocks, max_num_batched_tokens=setting.budget, max_num_seqs=setting.seqs
        )
        self.steps: list[Step] = []

    def execute(self, step: Step) -> StepResult:
        self.steps.append(step)
        return self._runner.execute(step)

    def close(self) -> None:
        """The runner is shared."""


class Lab:
    """One engine of a setting, and what every request got."""

    def __init__(self, runner: ModelRunner, setting: Setting, mask_of: MaskOf | None = None) -> None:
        self.runner = Narrowed(runner, setting)
        ticks = count()
        config = EngineConfig.model_validate(dict(setting.engine))
        self.engine = Engine(self.runner, config, "m", "r", lambda: next(ticks) * 1e-3, mask_of=mask_of)
        self.answers: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.errors: dict[int, str] = {}

    def submit(self, one: Asked, priority: int = 0) -> int:
        attempt = len(self.answers)
        self.answers[attempt] = list(one.emitted)
        message = GenerateRequest(
            attempt=attempt,
            request_id=str(attempt),
            choice=one.choice,
            prompt_ids=one.prompt,
            block_keys=(),
            sampling=one.sampling,
            emitted_ids=one.emitted,
            priority=priority,
        )
        bounce = self.engine.submit(0, message)
        if bounce is not None:
            self.errors[attempt] = bounce.message
        return attempt

    def step(self) -> None:
        output = self.engine.step()
        assert output is not None, "work is left, but nothing runs"
        for _, delta in output.deltas:
            self.answers[delta.attempt] += delta.token_ids
            if delta.cached_tokens is not None:
                self.cached[delta.attempt] = delta.cached_tokens
            if delta.error:
                self.errors[delta.attempt] = delta.error
        self.engine.check()

    def run(self, after_step: Callable[[Lab], None] = lambda lab: None) -> None:
        for _ in range(5000):
            if not self.engine.has_work:
                return
            self.step()
            after_step(self)
        raise AssertionError("the engine does not come to an end")

    def answer(self, requests: Iterable[Asked], **how: Any) -> Answers:
        """All at once."""
        attempts = [self.submit(one) for one in requests]
        self.run(**how)
        return [tuple(self.answers[attempt]) for attempt in attempts]

    @property
    def preemptions(self) -> int:
        return self.engine.load().preemptions


NO_CACHE = Setting(engine=(("enable_prefix_caching", False),))


def alone(runner: ModelRunner, table: Sequence[Asked] = TABLE) -> Answers:
    """Each in an engine of its own, cold: what all other situations are held against."""
    return [Lab(runner, NO_CACHE).answer([one])[0] for one in table]


def warm(runner: ModelRunner) -> tuple[Answers, int]:
    """Each when it has been answered before; and how many prompt tokens came from the cache."""
    lab = Lab(runner, Setting())
    for one in TABLE:
        lab.answer([one])
    before = len(lab.answers)
    answers = [lab.answer([one])[0] for one in TABLE]
    return answers, sum(lab.cached[attempt] for attempt in range(before, len(lab.answers)))


def with_strangers(runner: ModelRunner, setting: Setting) -> Answers:
    """All at once with priorities of every kind, strangers before, between and after them."""
    lab = Lab(runner, setting)
    stranger = asked(ids(50, 21), 20, temperature=2.0)
    lab.submit(stranger)
    lab.step()
    attempts = []
    for number, one in enumerate(TABLE):
        attempts.append(lab.submit(one, priority=number % 3))
        if number % 3 == 1:
            lab.step()
            lab.submit(asked(SHARED[:10] + ids(60 + number, 9), 6), priority=number % 2)
    lab.run()
    return [tuple(lab.answers[attempt]) for attempt in attempts]


def in_a_tiny_pool(runner: ModelRunner, blocks: int) -> tuple[Answers, int]:
    """All at once in so few blocks that they have to yield to one another; and how often they did. (Nobody forecasts their growth.)"""
    lab = Lab(runner, Setting(blocks=blocks, engine=(("batching", "iteration"),)))
    return lab.answer(TABLE), lab.preemptions


def preempted_at_will(runner: ModelRunner, seed: int, setting: Setting | None = None) -> tuple[Answers, int]:
    """Somebody loses slot and pages after every other step, wherever it stands."""
    draw = random.Random(seed)
    lab = Lab(runner, setting or Setting(budget=24))

    def preempt(lab: Lab) -> None:
        running = lab.engine.roster.running
        if running and draw.random() < 0.8 and lab.preemptions < 60:
            lab.engine.roster.preempt(draw.choice(list(running)))

    return lab.answer(TABLE, after_step=preempt), lab.preemptions


def moved(runner: ModelRunner, steps: int) -> tuple[Answers, int]:
    """Each goes to another engine after `steps` steps, with what it has emitted; and how many tokens that was."""
    first = Lab(runner, Setting())
    for one in TABLE:
        first.submit(one)
    for _ in range(steps):
        if first.engine.has_work:
            first.step()
    carried = [Asked(one.prompt, one.sampling, one.choice, tuple(first.answers[n])) for n, one in enumerate(TABLE)]
    return Lab(runner, Setting()).answer(carried), sum(len(one.emitted) for one in carried)


def parts_of(directory: Path) -> frozenset[str]:
    """What a checkpoint's model is made of: its kinds of weights, how far its layers look back, whether its embedding is its head."""
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        weights = frozenset(re.sub(r"[0-9]+", "N", name) for name in file.keys())  # noqa: SIM118 - a handle is no dict
    config = read_model_config(resolve(str(directory)))
    windows = {"a window" if window else "no window" for window in config.layer_windows}
    return weights | windows | {"a tied head" if config.tied_embeddings else "a head of its own"}


def different(expected: Answers, got: Answers) -> list[int]:
    """Numbers of the requests that were answered otherwise."""
    return [number for number, (right, found) in enumerate(zip(expected, got, strict=True)) if right != found]
