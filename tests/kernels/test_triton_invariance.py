"""Bit for bit, a row is what it is in every company: in another order, among other neighbours, cut otherwise. In Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.kernels.triton_interpreter  # noqa: F401  kernels are interpreted
from kernels.batch import PagedBatch
from kernels.reference.quantized_weight import quantize_fp8, quantize_int4, quantize_int8
from kernels.triton import linear_quantized as quantized_file
from kernels.triton.fused_moe import fused_moe
from kernels.triton.gelu_mul import gelu_mul
from kernels.triton.linear_quantized import linear_quantized
from kernels.triton.matmul_batch_invariant import matmul_batch_invariant
from kernels.triton.rms_norm import rms_norm
from kernels.triton.silu_mul import silu_mul
from tests.kernels.mutation import mutated
from tests.kernels.paged_rows import Rows, Shape

pytestmark = pytest.mark.patient

ROWS, DEPTH = 37, 96  # more than a tile of experts' and quantised layers' rows; whole groups and not
ORDER = torch.randperm(ROWS, generator=torch.Generator().manual_seed(4))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def experts(x: Tensor) -> Tensor:
    """The router's logits are the row's own."""
    gate_up, down = normal(5, 2 * 48, DEPTH, seed=1).to(x.dtype), normal(5, DEPTH, 48, seed=2).to(x.dtype)
    return fused_moe(x, x[:, :5].float().contiguous(), gate_up, down, 2)


WEIGHT = normal(40, DEPTH, seed=3)
BY_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: rms_norm(x.float().clone(), torch.ones(DEPTH, dtype=x.dtype), 1e-5, x * 2),
    "silu_mul": silu_mul,
    "gelu_mul": gelu_mul,
    "matmul_batch_invariant": lambda x: matmul_batch_invariant(x, WEIGHT.to(x.dtype)),
    "int8": lambda x: linear_quantized(x, quantize_int8(WEIGHT)),
    "fp8": lambda x: linear_quantized(x, quantize_fp8(WEIGHT)),
    "int4": lambda x: linear_quantized(x, quantize_int4(WEIGHT)),
    "fused_moe": experts,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", BY_ROWS)
def test_rows_in_another_order_and_among_others(name: str, dtype: torch.dtype) -> None:
    compute, x = BY_ROWS[name], normal(ROWS, DEPTH).to(dtype)
    whole = compute(x.clone())
    assert torch.equal(compute(x[ORDER].contiguous()), whole[ORDER]), "another order"
    assert torch.equal(compute(x[11:30].contiguous()), whole[11:30]), "a part of them, which tiles cut otherwise"
    strangers = torch.full_like(x, 60.0)
    strangers[[3, 20, 36]] = x[[3, 20, 36]]
    assert torch.equal(compute(strangers)[[3, 20, 36]], whole[[3, 20, 36]]), "other neighbours"


def test_a_sum_whose_order_depends_on_the_batch_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: splits added from the other end where the batch is large."""
    old, new = (
        "for split in range(splits):",
        "for turn in range(splits):\n        split = tl.where(tl.num_programs(0) > 20, splits - 1 - turn, turn)",
    )
    weight, x = quantize_int8(normal(8, 1100, seed=5)), normal(ROWS, 1100)  # three splits
    assert torch.equal(linear_quantized(x[11:30].contiguous(), weight), linear_quantized(x, weight)[11:30])
    monkeypatch.setattr(quantized_file, "join_splits_kernel", mutated(quantized_file, old, new, tmp_path).join_splits_kernel)
    assert not torch.equal(linear_quantized(x[11:30].contiguous(), weight), linear_quantized(x, weight)[11:30])


LENGTHS = [(600, 1), (3, 37), (20, 1), (0, 60), (290, 1), (64, 65)]


def taken(rows: Rows, order: list[int]) -> Rows:
    """These rows of the same cache, in this order."""
    some = Rows([rows.lengths[row] for row in order], rows.shape, rows.dtype)
    parts = rows.queries.split(rows.batch.counts.tolist())
    some.cache, some.queries = rows.cache, torch.cat([parts[row] for row in order])
    some.batch = PagedBatch(rows.batch.starts[order], rows.batch.counts[order], rows.batch.tables[order])
    return some


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_of_rows_in_another_order_and_without_some(dtype: torch.dtype, window: int | None) -> None:
    rows = Rows(LENGTHS, Shape(group=3), dtype)
    whole = rows.ours(window).split(rows.batch.counts.tolist())
    for order in ([5, 3, 0, 4, 2, 1], [1, 4], [3, 2]):
        assert torch.equal(taken(rows, order).ours(window), torch.cat([whole[row] for row in order])), order


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("cuts", [(7, 60), (16, 33, 60), (2, 31, 48, 60)], ids=str)
def test_attention_of_a_prompt_in_other_chunks(cuts: tuple[int, ...], window: int | None) -> None:
    """Of two tokens and more: one alone is a decode, whose sums are split."""
    whole = Rows([(0, 60)], Shape(group=3))
    right, begin = whole.ours(window), 0
    for end in cuts:
        part = Rows([(begin, end - begin)], whole.shape)
        part.cache, part.queries = whole.cache, whole.queries[begin:end]
        part.batch = PagedBatch(np.array([begin], np.int32), np.array([end - begin], np.int32), whole.batch.tables)
        assert torch.equal(part.ours(window), right[begin:end]), (begin, end)
        begin = end
