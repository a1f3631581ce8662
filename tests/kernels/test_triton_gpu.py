"""Compiled kernels on a real device, run by `make gpu`: right to the same tolerance as interpreted ones, alone as in a batch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from bench.kernels.attention_subjects import Rows
from bench.kernels.gpu_bench import check
from bench.kernels.subject import Subject
from bench.kernels.subjects import to_check
from kernels.ops import choose_operators
from replica.config import EngineConfig
from replica.runner import ModelRunner
from tests.replica.differential import BLOCK, TABLE, Lab, Setting, alone
from tests.replica.tiny_families import write_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process: make gpu compiles them"),
]
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("subject", list(to_check()), ids=lambda subject: subject.name)
def test_against_float64(subject: Subject) -> None:
    found = check(subject, DEVICE)
    assert found.passed, f"error {found.error}, at most {found.tolerance} {found.message}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_alone_is_the_row_in_a_batch(dtype: torch.dtype) -> None:
    """Bit for bit: norm, product, attention of a decode among others."""
    operators = choose_operators(DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(3)
    x = torch.randn(300, 512, generator=generator, device=DEVICE).to(dtype)
    weight = torch.randn(768, 512, generator=generator, device=DEVICE).to(dtype)
    whole = operators.matmul_batch_invariant(x, weight, None)
    for row in (0, 17, 299):
        assert torch.equal(operators.matmul_batch_invariant(x[row : row + 1], weight, None)[0], whole[row])
    rows = Rows(((700, 1), (40, 1), (3000, 1), (12, 60)), 32, 8, 128)
    batch = rows.batch()
    cache = torch.randn(int(batch.tables.max()) + 1, 2, 8, 16, 128, generator=generator, device=DEVICE).to(dtype)
    queries = torch.randn(rows.tokens, 32 * 128, generator=generator, device=DEVICE).to(dtype)
    plan = operators.plan_attention(batch, rows.layout, dtype, DEVICE, None)
    together = operators.paged_attention(queries, cache, plan, 0.1)
    for row in range(3):
        single = type(batch)(batch.starts[row : row + 1], batch.counts[row : row + 1], batch.tables[row : row + 1])
        plan = operators.plan_attention(single, rows.layout, dtype, DEVICE, None)
        assert torch.equal(operators.paged_attention(queries[row : row + 1], cache, plan, 0.1)[0], together[row])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_a_tiny_model_answers_as_torch_does(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and seeded, in float32: alone by torch, all at once in small steps and a small pool by the kernels."""
    config = EngineConfig(
        model=str(write_family(tmp_path / family, family)), dtype="float32", block_size=BLOCK, num_gpu_blocks_override=120, num_threads=1
    )
    monkeypatch.setenv("RANTANG_KERNELS", "reference")
    expected = alone(ModelRunner(config))
    monkeypatch.delenv("RANTANG_KERNELS")
    runner = ModelRunner(config)
    assert runner.kernels.startswith("Triton")
    assert Lab(runner, Setting(budget=16, blocks=60)).answer(TABLE) == expected
