"""A request whose mask, bias, stop list or logprobs is nonsense ends alone with a reason; its neighbours' ids stay what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import replica.intake
from replica.config import EngineConfig
from replica.contract.messages import GenerateRequest
from replica.runner import ModelRunner
from replica.step import TokenMask
from tests.replica import differential as lab
from tests.replica.tiny_llama import write_tiny_llama

VOCAB = 132
NAN = float("nan")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory = write_tiny_llama(tmp_path_factory.mktemp("faults"))
    config = EngineConfig(model=str(directory), dtype="float32", num_threads=1, block_size=lab.BLOCK, num_gpu_blocks_override=120)
    return ModelRunner(config)


@pytest.fixture(scope="module")
def expected(runner: ModelRunner) -> lab.Answers:
    return lab.alone(runner)


def among_neighbours(runner: ModelRunner, offender: lab.Asked, **how: Any) -> tuple[lab.Answers, lab.Lab, int]:
    """The table with `offender` in its middle: what the others got, the engine, the offender's attempt."""
    engine = lab.Lab(runner, lab.Setting(), **how)
    before = [engine.submit(one) for one in lab.TABLE[:4]]
    wrong = engine.submit(offender)
    after = [engine.submit(one) for one in lab.TABLE[4:]]
    engine.run()
    return [tuple(engine.answers[attempt]) for attempt in before + after], engine, wrong


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": ((5, NAN),)}, "logit_bias must be between"),
    ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias names a token outside"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids names a token outside"),
    ({"logprobs": -1}, "logprobs must be between"),
    ({"logprobs": 10**9}, "logprobs must be between"),
    ({"prompt_logprobs": -3}, "prompt_logprobs must be between"),
    ({"allowed_token_ids": ()}, "allowed_token_ids is empty"),
    ({"bad_words": ((),)}, "bad_words has an empty entry"),
    ({"temperature": NAN}, "temperature must be between"),
    ({"top_p": 0.0}, "top_p must be above 0"),
    ({"repetition_penalty": NAN}, "repetition_penalty must be above 0"),
]


@pytest.mark.parametrize(("changes", "reason"), NONSENSE, ids=lambda value: str(value)[:40])
def test_nonsense_is_refused_at_the_door(runner: ModelRunner, expected: lab.Answers, changes: dict[str, Any], reason: str) -> None:
    others, engine, wrong = among_neighbours(runner, lab.asked(lab.SHARED, 9, **changes))
    assert reason in engine.errors.pop(wrong) and engine.answers[wrong] == [] and not engine.errors
    assert lab.different(expected, others) == []


@pytest.mark.parametrize(("changes", "_"), NONSENSE, ids=lambda value: str(value)[:40])
def test_nonsense_past_the_door_harms_nobody_else(
    runner: ModelRunner, expected: lab.Answers, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], _: str
) -> None:
    """The second line: whatever the sampler makes of it, only this request can end of it."""
    monkeypatch.setattr(replica.intake, "fault_of", lambda message, limits: "")
    others, engine, wrong = among_neighbours(runner, lab.asked(lab.SHARED, 9, **changes))
    assert lab.different(expected, others) == [] and set(engine.errors) <= {wrong}


class Mask:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def allowed(self, output_ids: Any) -> Any:
        if self.kind == "fails later" and len(output_ids) == 3:
            raise RuntimeError("the grammar has lost its way")
        if self.kind == "too short":
            return np.ones(3, np.bool_)
        return np.full(VOCAB, self.kind != "lets nothing pass")


def mask_of(kind: str) -> Any:
    def of(message: GenerateRequest) -> TokenMask | None:
        if message.sampling.seed != 99:
            return None
        if kind == "cannot be made":
            raise ValueError("no such grammar")
        return Mask(kind)

    return of


@pytest.mark.parametrize(
    ("kind", "reason", "emitted"),
    [
        ("cannot be made", "its mask cannot be made: no such grammar", 0),
        ("fails later", "the grammar has lost its way", 3),
        ("too short", "(3,) entries of bool, (132,) of bool are expected", 0),
        ("lets nothing pass", "leave no token", 0),
        ("is fine", "", 9),
    ],
)
def test_a_mask_that_fails_ends_its_request_alone(runner: ModelRunner, expected: lab.Answers, kind: str, reason: str, emitted: int) -> None:
    others, engine, wrong = among_neighbours(runner, lab.asked(lab.SHARED, 9, seed=99), mask_of=mask_of(kind))
    assert reason in engine.errors.pop(wrong, "") and len(engine.answers[wrong]) == emitted and not engine.errors
    assert lab.different(expected, others) == []


class Odd:
    def allowed(self, output_ids: Any) -> Any:
        """Odd tokens after an even number of tokens, even ones after an odd number: counts the whole output."""
        return np.arange(VOCAB) % 2 != len(output_ids) % 2


def test_a_mask_sees_all_of_the_output_after_a_preemption(runner: ModelRunner) -> None:
    engine = lab.Lab(runner, lab.Setting(), mask_of=lambda message: Odd())
    attempt = engine.submit(lab.asked(lab.SHARED, 12, temperature=1.2))
    for _ in range(5):
        engine.step()
    engine.engine.roster.preempt(engine.engine.roster.running[0])
    engine.run()
    assert [token % 2 for token in engine.answers[attempt]] == [1, 0] * 6
    undisturbed = lab.Lab(runner, lab.Setting(), mask_of=lambda message: Odd()).answer([lab.asked(lab.SHARED, 12, temperature=1.2)])
    assert undisturbed == [tuple(engine.answers[attempt])]
