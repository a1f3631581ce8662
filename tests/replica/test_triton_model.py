"""A whole tiny model with Triton's kernels, interpreted: the same ids as with torch, whatever an engine has to do meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.triton import library
from kernels.triton.attention_plan import AttentionPlan
from kernels.triton.plan_values import from_values
from replica.config import EngineConfig
from replica.contract.model_error import ModelError
from replica.runner import ModelRunner
from replica.step import Row, Step
from tests.kernels import triton_interpreter  # noqa: F401 - for what it installs
from tests.kernels.triton_memory import counted
from tests.replica.differential import BLOCK, SHARED, Lab, Setting, asked, ids
from tests.replica.tiny_families import write_family

pytestmark = pytest.mark.patient

WINDOW = 24  # of the family "mistral"
TABLE = (
    asked(SHARED, 3),  # whole blocks
    asked(SHARED + ids(2, 5), 3, temperature=1.1, seed=3),
    asked(SHARED[:13] + ids(3, 21), 4, repetition_penalty=1.3),
    asked((5,), 3),
)


def runner_of(directory: Path, kernels: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> ModelRunner:
    monkeypatch.setenv("RANTANG_KERNELS", kernels)
    plain = {"dtype": "float32", "num_threads": 1, "block_size": BLOCK, "num_gpu_blocks_override": 60}
    config = EngineConfig.model_validate({"model": str(directory), **plain, **changes})
    runner = ModelRunner(config)
    assert runner.kernels.startswith("Triton" if kernels == "triton" else "torch")
    return runner


class Pair:
    """One checkpoint, held by both kernels."""

    def __init__(self, directory: Path, family: str) -> None:
        write_family(directory, family, num_hidden_layers=2)
        with pytest.MonkeyPatch.context() as patch:
            self.torch = runner_of(directory, "reference", patch)
            self.triton = runner_of(directory, "triton", patch)


@pytest.fixture(scope="module", params=["mistral", "qwen3", "qwen3-moe"])  # a sliding window; norms of heads; experts
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp(request.param), request.param)


def test_ids_with_chunked_prefill_and_cached_prefixes(pair: Pair) -> None:
    """All at once in steps of 16 tokens, then one of them again, which finds its prompt in the cache."""
    answers = []
    for runner in (pair.torch, pair.triton):
        lab = Lab(runner, Setting(budget=16, blocks=60))
        answers.append([*lab.answer(TABLE), *lab.answer(TABLE[1:2])])
        chunks = [row for step in lab.runner.steps for row in step.rows if row.start and len(row.tokens) > 1]
        assert chunks and lab.cached[len(TABLE)] >= len(SHARED), "prompts were cut, and reused"
        assert any(row.start > WINDOW for step in lab.runner.steps for row in step.rows)
    assert answers[0] == answers[1]


def test_ids_in_a_pool_too_small(pair: Pair) -> None:
    """So that they have to yield to one another, and are computed again."""
    answers = []
    for runner in (pair.torch, pair.triton):
        lab = Lab(runner, Setting(blocks=14, budget=48, engine=(("batching", "iteration"),)))
        answers.append(lab.answer(TABLE[:3]))
        assert lab.preemptions > 0
    assert answers[0] == answers[1]


def mixed_step() -> Step:
    """Two decodes' worth of one row each, and two chunks, on shuffled pages; positions before them are what the pool holds."""
    rows = (
        Row(1, list(ids(1, 1)), 37, [9, 3, 40, 22, 5, 17, 2, 51, 30, 8], None),
        Row(2, list(ids(2, 7)), 0, [12, 44], None),
        Row(3, list(ids(3, 1)), 0, [33], None),
        Row(4, list(ids(4, 30)), 11, [1, 59, 7, 25, 6, 48, 11, 50, 19, 29, 35], None),
    )
    return Step(1, rows, ())


def hidden_of(runner: ModelRunner, step: Step | None = None) -> torch.Tensor:
    from replica.step_inputs import build_inputs

    pool = runner._held.pool
    pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(5)))
    with torch.inference_mode():
        return runner.forward_pass.compute(build_inputs(step or mixed_step(), BLOCK)).hidden


def test_hidden_states_of_a_mixed_batch(pair: Pair) -> None:
    right, ours = hidden_of(pair.torch), hidden_of(pair.triton)
    assert float((ours - right).norm() / right.norm()) < 1e-5
    written = pair.triton._held.pool - pair.torch._held.pool
    assert float(written.norm() / pair.torch._held.pool.norm()) < 1e-5, "and what was written to the pages"


@pytest.mark.parametrize("quantization", ["w8a16", "w4a16", "fp8"])
def test_quantised_weights(quantization: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The kernels compute with them what torch does: ids and hidden states. Biases and norms of heads are there too."""
    directory = write_family(tmp_path_factory.mktemp(quantization), "qwen2", num_hidden_layers=1)
    right, ours = (runner_of(directory, kernels, monkeypatch, quantization=quantization) for kernels in ("reference", "triton"))
    assert f", {quantization}: " in ours.kernels
    with counted() as traffic:
        hidden = hidden_of(ours)
    assert traffic.launches.count("linear_quantized_kernel") == 4, "products of one layer"
    expected = hidden_of(right)
    assert float((hidden - expected).norm() / expected.norm()) < 1e-5
    plain = hidden_of(runner_of(directory, "reference", monkeypatch))
    assert 1e-3 < float((plain - expected).norm() / expected.norm()) < 0.3, "they are not the weights that were quantised"
    setting = Setting(budget=16, blocks=60)
    assert Lab(ours, setting).answer(TABLE[1:3]) == Lab(right, setting).answer(TABLE[1:3])


@pytest.mark.parametrize(("invariant", "quantization"), [(True, None), (False, None), (True, "w4a16")])
def test_a_row_alone_has_the_bits_of_the_row_in_a_batch(
    invariant: bool, quantization: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With batch_invariant; without it torch's product of one row is not that of many, or the test would show nothing."""
    directory = write_family(tmp_path_factory.mktemp("invariant"), "llama", num_hidden_layers=1, hidden_size=192, intermediate_size=384)
    runner = runner_of(directory, "triton", monkeypatch, batch_invariant=invariant, quantization=quantization)
    together = hidden_of(runner)
    alone = hidden_of(runner, Step(1, mixed_step().rows[:1], ()))
    assert torch.equal(alone[0], together[0]) == invariant


def test_batch_invariance_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = write_family(tmp_path_factory.mktemp("refused"), "llama")
    with pytest.raises(ModelError, match=r"batch_invariant holds for one rank with Triton's kernels or the C\+\+ step; here 1 of torch"):
        runner_of(directory, "reference", monkeypatch, batch_invariant=True)


@contextmanager
def attention_with(patch: Any, change: Any) -> Iterator[None]:
    """Plans changed on their way to the kernels."""

    def changed(tensors: Any, numbers: Any) -> AttentionPlan:
        plan: AttentionPlan = change(from_values(tensors, numbers))
        return plan

    patch.setattr(library, "from_values", changed)
    yield


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: replace(plan, window=plan.window and plan.window + 1),
        lambda plan: replace(plan, starts=(plan.starts - 1).clamp(min=0)),
        lambda plan: replace(plan, tables=plan.tables.roll(1, 1)),
    ],
    ids=["a window one too long", "a position one too early", "pages in another order"],
)
def test_what_is_a_little_wrong_is_seen(change: Any, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The control of the comparison above."""
    pair = Pair(tmp_path_factory.mktemp("control"), "mistral")
    right = hidden_of(pair.torch)
    with attention_with(monkeypatch, change):
        ours = hidden_of(pair.triton)
    assert float((ours - right).norm() / right.norm()) > 1e-3
