"""Traces of public incidents, replayed on an engine under a modelled clock.

A trace is {case, config, events}. `prompt` of an event is a length (ids of its own), or the first `prefix_len` ids of a named
sequence and `tail` ids of its own; `n` choices are n requests; `disconnect` ends all of them.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from core_harness import COST, EOS, VOCAB, Driver, PagedRunner, limits

from replica.contract.messages import FinishReason, GenerateRequest, SamplingParams
from replica.mock_runner import mock_token, modelled_step_s
from replica.step import Step

_FILES = Path(__file__).parent / "case_traces"
_FIRST_ID = EOS + 1
_CHECK_EVERY_STEPS = 16


@dataclass
class Told:
    """One choice of one event."""

    attempt: int
    message: GenerateRequest
    refused: str = ""


@dataclass
class Replay:
    """An engine that has met the trace; `told` by event id, then choice."""

    driver: Driver
    told: dict[str, list[Told]] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)  # before each step
    waiting: list[int] = field(default_factory=list)

    def text(self, name: str, choice: int = 0) -> list[int]:
        return self.driver.text(self.told[name][choice].attempt)

    def texts(self) -> dict[tuple[str, int], list[int]]:
        return {(name, i): self.driver.text(told.attempt) for name, choices in self.told.items() for i, told in enumerate(choices)}

    def finishes(self) -> set[FinishReason | None]:
        return {self.driver.finish(told.attempt) for choices in self.told.values() for told in choices if not told.refused}

    def recomputed(self) -> int:
        """Tokens computed beyond each position of each request once (and prompts found in the cache)."""
        once = 0
        for choices in self.told.values():
            for told in choices:
                heard = self.driver.heard[0, told.attempt]
                once += len(told.message.prompt_ids) + len(heard.token_ids) - 1 - (heard.cached_tokens or 0)
        return self.driver.tokens_computed() - once


def load(case: str) -> dict[str, Any]:
    trace: dict[str, Any] = msgspec.json.decode(gzip.decompress((_FILES / f"{case}.json.gz").read_bytes()))
    return trace


def replay(
    case: str,
    *,
    prepare: Callable[[Driver], None] = lambda driver: None,
    after_step: Callable[[Driver], None] = lambda driver: None,
    until: Callable[[Replay], bool] = lambda replay: False,
    blocks: int | None = None,
    seqs: int | None = None,
    **engine: Any,
) -> Replay:
    """The whole trace, or `until`. `blocks` and `seqs` are other ones than the trace's; `engine` as in EngineConfig."""
    trace = load(case)
    config = trace["config"]
    limit = limits(
        blocks or config["blocks"],
        block=config["block"],
        seqs=seqs or config["max_num_seqs"],
        budget=config["max_num_batched_tokens"],
        context=config["max_model_len"],
    )
    order = "priority" if config["policy"] == "priority" else "fcfs"
    driver = Driver(PagedRunner(limit), check=False, scheduling_policy=order, **engine)
    prepare(driver)
    done = Replay(driver)
    events = sorted(trace["events"], key=lambda event: event["t_ms"])
    while (events or driver.engine.has_work) and not until(done):
        if events and not driver.engine.has_work:
            driver.now_s = max(driver.now_s, events[0]["t_ms"] / 1000)
        while events and events[0]["t_ms"] / 1000 <= driver.now_s:
            _take(done, events.pop(0))
        if driver.engine.has_work:
            done.running.append(len(driver.engine.roster.running))
            done.waiting.append(len(driver.engine.roster.waiting))
            assert driver.step() is not None, "work is left, but nothing runs"
            after_step(driver)
            if len(done.running) % _CHECK_EVERY_STEPS == 0:
                driver.engine.check()
    driver.engine.check()
    return done


def full_step_s(tokens: int, decodes: int) -> float:
    return COST.a + COST.b * tokens + COST.c * decodes


def step_s(step: Step) -> float:
    return modelled_step_s(COST, step)


def _take(done: Replay, event: dict[str, Any]) -> None:
    engine = done.driver.engine
    if event["op"] == "disconnect":
        for told in done.told[event["id"]]:
            engine.cancel(0, told.attempt)
        done.driver.take(engine.flush())
        return
    assert event["op"] == "add", event
    done.told[event["id"]] = []
    for choice in range(event.get("n", 1)):
        attempt = sum(map(len, done.told.values())) + 1
        sampling = SamplingParams(
            seed=event.get("seed", 0), max_tokens=event["max_tokens"], ignore_eos=True, temperature=event.get("temperature", 0.0)
        )
        message = GenerateRequest(
            attempt, event["id"], choice, _prompt(event["id"], event["prompt"]), (), sampling, priority=event.get("priority", 0)
        )
        bounce = engine.submit(0, message)
        done.told[event["id"]].append(Told(attempt, message, bounce.message if bounce is not None else ""))


def _prompt(name: str, prompt: int | dict[str, Any]) -> tuple[int, ...]:
    if isinstance(prompt, int):
        return sequence(name, prompt)
    return sequence(prompt["prefix"], prompt["prefix_len"]) + sequence(f"{name} tail", prompt["tail"])


def sequence(name: str, count: int) -> tuple[int, ...]:
    """The first ids of a named sequence."""
    seed = int.from_bytes(name.encode(), "little")
    return tuple(_FIRST_ID + mock_token(seed, 0, position, VOCAB - _FIRST_ID) for position in range(count))
