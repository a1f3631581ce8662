"""Norm and gates, which go row by row: Triton's interpreter against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels.triton.gelu_mul as gelu_file
import kernels.triton.rms_norm as norm_file
import kernels.triton.silu_mul as silu_file
import tests.kernels.triton_interpreter  # noqa: F401  kernels are interpreted
from kernels.errors import KernelError
from kernels.reference.gelu_mul import gelu_mul as gelu_reference
from kernels.reference.rms_norm import rms_norm as norm_reference
from kernels.reference.silu_mul import silu_mul as silu_reference
from kernels.triton.gelu_mul import gelu_mul
from kernels.triton.rms_norm import rms_norm
from kernels.triton.silu_mul import silu_mul
from tests.kernels.mutation import mutated
from tests.kernels.paged_rows import TOLERANCES, Poison, relative_error
from tests.kernels.triton_memory import counted

pytestmark = pytest.mark.patient

SHAPES = [(1, 576), (3, 1000), (17, 4097), (2, 1)]
GATES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (silu_mul, silu_reference),
    "gelu tanh": (gelu_mul, gelu_reference),
    "gelu erf": (lambda x: gelu_mul(x, "none"), lambda x: gelu_reference(x, "none")),
}


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    with Poison():
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm_error(rows: int, width: int, dtype: torch.dtype, has_delta: bool) -> float:
    """The worse of the result's and the stream's."""
    stream, weight = normal(rows, width) * 3, normal(width, seed=1).to(dtype)
    delta = normal(rows, width, seed=2).to(dtype) if has_delta else None
    exact = stream.double()
    right = norm_reference(exact, weight.double(), 1e-5, None if delta is None else delta.double())
    ours = norm_file.rms_norm(stream, weight, 1e-5, delta)
    assert ours.dtype is dtype
    return max(relative_error(ours, right), relative_error(stream, exact))


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert norm_error(*shape, dtype, has_delta=True) < TOLERANCES[dtype]
    assert norm_error(*shape, dtype, has_delta=False) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gate", list(GATES))
def test_gates(gate: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    ours, right = GATES[gate]
    gate_up = (normal(shape[0], 2 * shape[1]) * 4).to(dtype)
    before = gate_up.clone()
    assert relative_error(ours(gate_up), right(gate_up.double())) < TOLERANCES[dtype]
    assert torch.equal(gate_up, before)


def test_gates_of_extreme_values() -> None:
    gate_up = torch.tensor([[-1e30, -100.0, 0.0, 100.0, 1e30, 1.0, 1.0, 1.0, 1.0, 1.0]])
    for ours, _ in GATES.values():
        assert torch.allclose(ours(gate_up), torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e30]]), atol=1e-30)


def test_a_row_alone_is_the_row_in_a_batch() -> None:
    stream, delta, weight = normal(17, 1000), normal(17, 1000, seed=1).half(), normal(1000, seed=2).half()
    kept = stream.clone()
    together = rms_norm(stream, weight, 1e-5, delta)
    for row in (0, 7, 16):
        assert torch.equal(rms_norm(kept[row : row + 1].clone(), weight, 1e-5, delta[row : row + 1]), together[row : row + 1])
        for ours, _ in GATES.values():
            assert torch.equal(ours(delta[row : row + 1].contiguous()), ours(delta)[row : row + 1])


def test_no_rows() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
    assert silu_mul(torch.empty(0, 8)).shape == gelu_mul(torch.empty(0, 8)).shape == (0, 4)


def test_a_rows_nan_stays_with_it() -> None:
    stream = normal(3, 100)
    stream[1, 50] = float("nan")
    normed = rms_norm(stream, torch.ones(100), 1e-5)
    assert normed[1].isnan().all() and normed[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_are_those_of_the_docstrings(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    with counted() as moved:
        rms_norm(normal(5, 1000), torch.ones(1000, dtype=dtype), 1e-5, normal(5, 1000).to(dtype))
    assert moved.moved == 5 * 1000 * (8 + 2 * size) + 1000 * size
    with counted() as moved:
        rms_norm(normal(5, 1000), torch.ones(1000, dtype=dtype), 1e-5)
    assert moved.moved == 5 * 1000 * (4 + size) + 1000 * size
    for ours, _ in GATES.values():
        with counted() as moved:
            ours(normal(5, 2000).to(dtype))
        assert moved.moved == 3 * 5 * 1000 * size


def test_what_is_not_served_is_said() -> None:
    with pytest.raises(KernelError, match="sizes up to 16384"):
        rms_norm(torch.zeros(1, 20000), torch.ones(20000), 1e-5)
    with pytest.raises(KernelError, match="float64"):
        silu_mul(torch.zeros(1, 8, dtype=torch.float64))


def test_the_checks_see_what_is_wrong_in_the_last_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = mutated(norm_file, "inside = column < width", "inside = column < width - width // 1000", tmp_path)
    monkeypatch.setattr(norm_file, "rms_norm_kernel", wrong.rms_norm_kernel)
    assert not norm_error(3, 1000, torch.float32, True) < 1e-6
    for file, kernel, call in ((silu_file, "silu_mul_kernel", silu_mul), (gelu_file, "gelu_mul_kernel", gelu_mul)):
        wrong = mutated(file, "inside = column < width", "inside = column < width - width // 1000", tmp_path)
        monkeypatch.setattr(file, kernel, getattr(wrong, kernel))
        gate_up = normal(3, 2000)
        right = (silu_reference if file is silu_file else gelu_reference)(gate_up.double())
        assert not relative_error(call(gate_up), right) < 1e-6
