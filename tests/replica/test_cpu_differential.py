"""Identical ids on the C++ step in every form of the weights, whatever an engine has to do meanwhile; and every architecture's logits.

Nothing is allowed for near-ties: the step promises the same bits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replica.config import EngineConfig, Quantization
from replica.runner import ModelRunner
from replica.step import Draw, Row, Step
from tests.kernels.plain_decoder import library_or_reason
from tests.replica import differential as lab
from tests.replica.model_driver import greedy
from tests.replica.tiny_families import DENSE, write_family

_, REASON = library_or_reason()
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"no C++ step here: {REASON}")
TOKENS = [(7 * i * i + 3 * i) % 130 + 1 for i in range(90)]


def write(directory: Path, family: str) -> Path:
    """Of sizes that the step computes."""
    return write_family(directory, family, hidden_size=128, num_attention_heads=4, **({"head_dim": 32} if family == "qwen3" else {}))


def runner_of(
    directory: Path, dtype: str = "bfloat16", quantization: Quantization | None = None, threads: int = 1, **more: str
) -> ModelRunner:
    """Bits do not depend on the number of threads (test_cpu_step), and a busy machine makes several wait for one another."""
    config = {
        "model": str(directory),
        "dtype": dtype,
        "num_threads": threads,
        "num_gpu_blocks_override": 120,
        "quantization": quantization,
        **more,
    }
    return ModelRunner(EngineConfig.model_validate(config))


def logits_of(runner: ModelRunner, length: int) -> torch.Tensor:
    row = Row(0, TOKENS[:length], 0, [5, 9, 2, 40, 41, 3], Draw(greedy(), 0, TOKENS[:length], ()))
    return runner.forward(Step(0, (row,)))[0].double()


@pytest.mark.parametrize("family", DENSE)
def test_logits_of_every_architecture(tmp_path: Path, family: str) -> None:
    directory = write(tmp_path, family)
    exact, runner = runner_of(directory, "float32"), runner_of(directory)
    assert runner.kernels.startswith("C++")
    for length in (1, 17, 90):
        meant = logits_of(exact, length)
        found = logits_of(runner, length)
        assert float((found - meant).norm() / meant.norm()) < 0.1, length  # weights and activations are rounded, and the model is wild
        assert float((logits_of(exact, length - 1 or 2) - meant).norm() / meant.norm()) > 0.5, "another position is far away"


SUBJECTS = [("mistral", None, 2, "auto"), ("qwen3", "w8a8", 1, "auto"), ("mistral", "w4a8", 1, "auto"), ("mistral", None, 1, "int8")]


@pytest.mark.parametrize(("family", "form", "threads", "cache"), SUBJECTS)
def test_the_same_ids_in_every_situation(tmp_path: Path, family: str, form: Quantization | None, threads: int, cache: str) -> None:
    runner = runner_of(write(tmp_path, family), quantization=form, threads=threads, kv_cache_dtype=cache)
    expected = lab.alone(runner)
    answers, cached = lab.warm(runner)
    assert lab.different(expected, answers) == [] and cached > 0
    answers, preemptions = lab.preempted_at_will(runner, seed=1)
    assert lab.different(expected, answers) == [] and preemptions > 10
    answers, carried = lab.moved(runner, 5)
    assert lab.different(expected, answers) == [] and carried > 0
    for budget in (1, 7, 33):
        assert lab.different(expected, lab.Lab(runner, lab.Setting(budget=budget)).answer(lab.TABLE)) == [], budget
    assert lab.different(expected, lab.with_strangers(runner, lab.Setting(budget=24, blocks=60))) == []
