"""The harness itself: that it computes as a GPU would, sees every address, and counts what it should."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from kernels.errors import KernelError
from kernels.triton.tiles import HALVES, NVIDIA, Tile, TileRow, TileTable, architecture_of, pretend
from tests.kernels.toy_kernels import careless_kernel, page_sum, product_kernel, scale
from tests.kernels.triton_interpreter import InterpreterError
from tests.kernels.triton_memory import counted, fenced

CPU = torch.device("cpu")
LENGTHS = (1, 63, 64, 65, 300)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_round_as_torch_and_gpus_do(dtype: torch.dtype) -> None:
    x = torch.randn(500) * 3
    rounded = scale(x, 1.0, out_dtype=dtype) if dtype.itemsize > 1 else scale_into(x, dtype)
    assert torch.equal(rounded.float(), x.to(dtype).float())
    assert torch.equal(scale(rounded, 1.0, out_dtype=torch.float32), rounded.float()), "and back"


def scale_into(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    from tests.kernels.toy_kernels import BLOCK, scale_kernel

    out = torch.zeros_like(x, dtype=dtype)
    scale_kernel[(-(-x.numel() // BLOCK),)](x, out, x.numel(), 1.0, BLOCK, 0)
    return out


def test_float8_saturates() -> None:
    assert scale_into(torch.tensor([1e9, -1e9]), torch.float8_e4m3fn).float().tolist() == [448.0, -448.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dots_in_every_dtype(dtype: torch.dtype) -> None:
    a, b, out = torch.randn(16, 32).to(dtype), torch.randn(32, 16).to(dtype), torch.empty(16, 16)
    with counted() as traffic:
        product_kernel[(1,)](a, b, out, 16, 16, 32)
    right = a.double() @ b.double()
    assert float((out - right).norm() / right.norm()) < 1e-6
    assert traffic.operations == 2 * 16 * 16 * 32


def test_arithmetic_on_bfloat16_is_refused() -> None:
    with pytest.raises(InterpreterError, match="cast to float32"):
        careless_kernel[(1,)](torch.ones(16, dtype=torch.bfloat16), torch.ones(16, dtype=torch.bfloat16), 16)


@pytest.mark.parametrize("length", LENGTHS)
def test_reading_one_element_past_the_end_is_seen(length: int) -> None:
    x = torch.randn(length)
    assert torch.equal(scale(x, 2.0), x * 2)
    if length % 64:  # a whole tile has no lane left that could read too far
        with pytest.raises(InterpreterError, match="loads 1 elements outside its arguments, the first 0 bytes past the end of x_ptr"):
            scale(x, 2.0, extra=1)


def test_a_tensor_inside_another_ends_where_it_ends() -> None:
    whole = torch.randn(200)
    assert torch.equal(scale(whole[10:110], 1.0), whole[10:110])
    with pytest.raises(InterpreterError, match="outside its arguments"):
        scale(whole[10:110], 1.0, extra=1)


def test_pages_that_do_not_exist_are_seen() -> None:
    cache = fenced(torch.randn(5, 16))
    table = torch.tensor([4, 0, 2], dtype=torch.int32)
    assert abs(float(page_sum(cache, table, 35) - cache[[4, 0]].sum() - cache[2, :3].sum())) < 1e-4
    for page in (5, -1):
        table[2] = page
        with pytest.raises(InterpreterError, match="outside its arguments"):
            page_sum(cache, table, 35)


@pytest.mark.parametrize("length", [16, 17, 31, 32])
def test_forgetting_the_last_page_is_a_wrong_result(length: int) -> None:
    """What lengths around a page are for: only those that do not fill it tell."""
    cache, table = torch.randn(4, 16).abs() + 1, torch.tensor([2, 1], dtype=torch.int32)
    right = cache[table].reshape(-1)[:length].double().sum()
    assert abs(float(page_sum(cache, table, length) / right) - 1) < 1e-5
    wrong = abs(float(page_sum(cache, table, length, last=False) / right) - 1) > 1e-2
    assert wrong == bool(length % 16)


def test_bytes_count_once_however_often_they_are_touched() -> None:
    x = torch.randn(300)
    with counted() as traffic:
        scale(x, 1.0)
    assert (traffic.read, traffic.written, traffic.loaded, traffic.launches) == (1200, 1200, 1200, ["scale_kernel"])
    cache = torch.randn(3, 16)
    with counted() as traffic:
        page_sum(cache, torch.tensor([1, 1, 1], dtype=torch.int32), 48)
    assert (traffic.read, traffic.written, traffic.loaded) == (64 + 12, 4, 192 + 12)


FENCES = """
import tests.kernels.triton_interpreter
import torch
from tests.kernels import triton_memory
from tests.kernels.toy_kernels import scale
triton_memory._touch = lambda *ignored: None
x = triton_memory.fenced(torch.ones(33), front={front})
{read}
print("alive")
"""


@pytest.mark.parametrize(("front", "read"), [(False, "scale(x, 2.0, extra=1)"), (True, "x.data_ptr(); scale(x[:1].expand(1), 2.0)")])
def test_a_fence_kills_who_passes_it(front: bool, read: str) -> None:
    """Where the check of addresses is switched off; what stays inside lives."""
    code = textwrap.dedent(FENCES).format(front=front, read=read)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (0 if front else -signal.SIGSEGV), done.stderr


def test_tables_refuse_with_what_would_work() -> None:
    table = TileTable("toy", (TileRow(NVIDIA, HALVES, Tile(n=64), size_max=128), TileRow(("sm_90",), HALVES, Tile(n=32), size_max=256)))
    assert table.tile("sm_80", torch.float16, 128) == Tile(n=64) and table.tile("sm_90", torch.float16, 129) == Tile(n=32)
    with pytest.raises(KernelError, match=r"toy has no tile for sm_75 \(it has for sm_80, sm_90, sm_100\); RANTANG_KERNELS=reference"):
        table.tile("sm_75", torch.float16)
    with pytest.raises(KernelError, match=r"toy does not compute float64 on sm_90 .it does float16, bfloat16"):
        table.tile("sm_90", torch.float64)
    with pytest.raises(KernelError, match="sizes up to 128 in float16 on sm_80, not 256"):
        table.tile("sm_80", torch.float16, 256)


def test_an_architecture_can_be_pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert architecture_of(CPU) == "sm_90", "what is interpreted counts as that"
    with pretend("gfx942"):
        assert architecture_of(CPU) == "gfx942"
    with pytest.raises(KernelError, match="do not run on meta"):
        architecture_of(torch.device("meta"))
