"""The batch-invariant matrix product: Triton's interpreter against float64, and a row alone against the row in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels.triton.matmul_batch_invariant as file
import tests.kernels.triton_interpreter  # noqa: F401  kernels are interpreted
from kernels.reference.matmul_batch_invariant import matmul_batch_invariant as reference
from kernels.triton.tiles import pretend
from tests.kernels.mutation import mutated
from tests.kernels.paged_rows import TOLERANCES, Poison, relative_error
from tests.kernels.triton_memory import counted

pytestmark = pytest.mark.patient

SHAPES = [(1, 576, 576), (3, 1000, 130), (17, 33, 4097), (130, 260, 65), (1, 1, 1)]  # M, N, K


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    with Poison():
        yield


def operands(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, depth), (columns, depth), (columns,)))
    return x, weight, bias


def error(rows: int, columns: int, depth: int, dtype: torch.dtype) -> float:
    x, weight, bias = operands(rows, columns, depth, dtype)
    ours = file.matmul_batch_invariant(x, weight, bias)
    assert ours.dtype is dtype and ours.shape == (rows, columns)
    return relative_error(ours, reference(x.double(), weight.double(), bias.double()))


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert error(*shape, dtype) < TOLERANCES[dtype]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100", "gfx942"])
def test_tiles_of_other_architectures(architecture: str) -> None:
    with pretend(architecture):
        assert error(17, 130, 257, torch.float16) < 1e-3
        assert error(17, 130, 257, torch.float32) < 1e-6


def test_without_bias_and_without_rows() -> None:
    x, weight, _ = operands(3, 40, 50, torch.float32)
    assert relative_error(file.matmul_batch_invariant(x, weight), reference(x.double(), weight.double())) < 1e-6
    assert file.matmul_batch_invariant(x[:0], weight).shape == (0, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_alone_is_the_row_in_a_batch(dtype: torch.dtype) -> None:
    x, weight, bias = operands(150, 70, 300, dtype)
    together = file.matmul_batch_invariant(x, weight, bias)
    for row in (0, 1, 63, 64, 128, 149):
        assert torch.equal(file.matmul_batch_invariant(x[row : row + 1], weight, bias), together[row : row + 1])
    assert torch.equal(file.matmul_batch_invariant(x[10:40], weight, bias), together[10:40])


def test_bytes_and_operations_are_those_of_the_docstring() -> None:
    x, weight, _ = operands(20, 130, 256, torch.float16)
    tile = file.TILES.tile("sm_90", torch.float16)
    with counted() as moved:
        file.matmul_batch_invariant(x, weight)
    assert moved.moved == 2 * (20 * 256 + 130 * 256 + 20 * 130)
    assert moved.operations == 2 * tile.m * 2 * tile.n * 256, "two whole tiles of columns"


def test_the_check_sees_what_is_wrong_in_the_last_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for old, new in (
        ("mask=k[None, :] < depth - start", "mask=k[None, :] < depth - start - 1"),
        ("mask=(row < rows)[:, None]", "mask=(row < rows - 1)[:, None]"),
    ):
        wrong = mutated(file, old, new, tmp_path)
        monkeypatch.setattr(file, "matmul_kernel", wrong.matmul_kernel)
        assert not error(17, 130, 257, torch.float32) < 1e-3
