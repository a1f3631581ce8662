"""Linear layers with int8, fp8 and int4 weights: packing, Triton's interpreter against float64, a row alone against the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels.triton.linear_quantized as file
import tests.kernels.triton_interpreter  # noqa: F401  kernels are interpreted
from kernels.cpu.packed import dequantise, quantise_q4, quantise_q8
from kernels.reference.linear_quantized import linear_quantized as reference
from kernels.reference.quantized_weight import (
    QuantizedWeight,
    dequantize,
    pack_fp8,
    pack_groups,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)
from tests.kernels.mutation import mutated
from tests.kernels.paged_rows import TOLERANCES, Poison, relative_error
from tests.kernels.triton_memory import counted

pytestmark = pytest.mark.patient

QUANTIZE: dict[str, Callable[[Tensor], QuantizedWeight]] = {"int8": quantize_int8, "fp8": quantize_fp8, "int4": quantize_int4}
SHAPES = [(1, 130, 576), (3, 40, 1000), (17, 129, 65), (2, 9, 1)]  # M, N, K


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    with Poison():
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(form: str, shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    rows, columns, depth = shape
    x, bias = normal(rows, depth).to(dtype), normal(columns, seed=1).to(dtype)
    weight = QUANTIZE[form](normal(columns, depth, seed=2))
    ours = file.linear_quantized(x, weight, bias)
    assert ours.dtype is dtype and ours.shape == (rows, columns)
    return relative_error(ours, reference(x.double(), weight, bias.double()))


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", list(QUANTIZE))
def test_linear(form: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert error(form, shape, dtype) < TOLERANCES[dtype]


@pytest.mark.parametrize(("form", "lost"), [("int8", 0.01), ("fp8", 0.04), ("int4", 0.12)])
@pytest.mark.parametrize("shape", [(576, 576), (1000, 4097), (1, 31)], ids=str)
def test_quantised_weights_are_near_what_they_were(form: str, lost: float, shape: tuple[int, int]) -> None:
    weight = normal(*shape)
    packed = QUANTIZE[form](weight)
    assert packed.form == form and dequantize(packed).shape == shape
    assert relative_error(dequantize(packed), weight) < lost
    assert not dequantize(packed, torch.float64).isnan().any()


def test_groups_of_the_cpu_step_mean_the_same_here() -> None:
    for groups in (quantise_q8(normal(70, 96)), quantise_q4(normal(70, 96))):
        assert torch.equal(dequantize(pack_groups(groups, 96)), dequantise(groups))


def test_every_code_of_e4m3_is_exact() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127].view(torch.float8_e4m3fn).repeat(2, 1)  # all but NaN
    weight = pack_fp8(codes, torch.tensor([1.0, 0.37]))
    identity = torch.eye(codes.shape[1])
    assert torch.equal(file.linear_quantized(identity, weight), dequantize(weight).T)
    assert torch.equal(file.linear_quantized(identity[::9].half(), weight)[:, 0], codes[0, ::9].half())
    assert torch.equal(file.linear_quantized(identity[::9].bfloat16(), weight)[:, 0], codes[0, ::9].bfloat16())


@pytest.mark.parametrize("form", list(QUANTIZE))
def test_a_row_alone_is_the_row_in_a_batch(form: str) -> None:
    x, weight = normal(35, 1100).half(), QUANTIZE[form](normal(40, 1100, seed=1))
    together = file.linear_quantized(x, weight)
    for row in (0, 15, 34):
        assert torch.equal(file.linear_quantized(x[row : row + 1], weight), together[row : row + 1])
    assert file.linear_quantized(x[:0], weight).shape == (0, 40)


def test_bytes_are_those_of_the_docstring() -> None:
    for form in QUANTIZE:
        x, weight = normal(4, 1024).half(), QUANTIZE[form](normal(256, 1024, seed=1))
        with counted() as moved:
            file.linear_quantized(x, weight)
        assert moved.moved == weight.nbytes + 2 * 4 * (1024 + 256) + 8 * 4 * 256 * 2
        scales = {"int8": 256 * 1024 // 16, "int4": 256 * 1024 // 8, "fp8": 4 * 256}[form]
        assert weight.nbytes == 256 * 1024 // (2 if form == "int4" else 1) + scales
        assert moved.operations == 2 * 16 * 256 * 1024


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        ("linear_quantized_kernel", "tl.minimum(split * SPLIT + SPLIT, groups)", "tl.minimum(split * SPLIT + SPLIT, groups - 1)"),
        ("linear_quantized_kernel", "k + HALF, depth)", "k, depth)"),
        ("join_splits_kernel", "for split in range(splits)", "for split in range(splits - 1)"),
    ],
    ids=["last group", "high nibbles", "last split"],
)
def test_the_check_sees_what_is_wrong_in_the_last_tile(
    kernel: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, kernel, getattr(mutated(file, old, new, tmp_path), kernel))
    assert not error("int4", (3, 40, 1100), torch.float32) < 1e-3
