"""Rope with the write of keys and values, caches of eight bits, and copies of pages: Triton's interpreter against the reference."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import tests.kernels.triton_interpreter  # noqa: F401  kernels are interpreted
from kernels.errors import KernelError
from kernels.reference.attention_plan import plan_attention as plan_reference
from kernels.reference.cache_form import LARGEST, dequantize_heads, quantize_heads
from kernels.reference.copy_blocks import copy_blocks as copy_reference
from kernels.reference.paged_attention import paged_attention as attention_reference
from kernels.reference.rope_kv_write import HeadNorms
from kernels.reference.rope_kv_write import rope_kv_write as write_reference
from kernels.triton.copy_blocks import copy_blocks, independent_runs
from kernels.triton.paged_attention import paged_attention
from kernels.triton.rope_kv_write import e4m3_bits, rope_kv_write
from kernels.triton.tiles import pretend
from tests.kernels.paged_rows import CPU, NAN, TOLERANCES, Poison, Rows, Shape, relative_error
from tests.kernels.triton_memory import counted

pytestmark = pytest.mark.patient

FORMS = [torch.int8, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    with Poison():
        yield


class Write:
    """Random heads of the new tokens of `rows`, their angles and norms; exact twins for the reference."""

    def __init__(self, rows: Rows, normed: bool = False) -> None:
        shape, tokens = rows.shape, rows.queries.shape[0]
        generator = torch.Generator().manual_seed(3)
        self.rows = rows
        self.qkv = torch.randn(tokens, shape.kv_heads * (shape.group + 2) * shape.dim, generator=generator).to(rows.dtype)
        angles = torch.randn(tokens, shape.dim // 2, generator=generator)
        self.cosine, self.sine = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
        weights = [(torch.rand(shape.dim, generator=generator) + 0.5).to(rows.dtype) for _ in range(2)]
        self.norms = HeadNorms(*weights, 1e-3) if normed else None

    def ours(self, cache: Tensor, scales: Tensor | None = None) -> Tensor:
        return rope_kv_write(self.qkv, self.cosine, self.sine, cache, self.rows.plan(), self.norms, scales)

    def right(self, cache: Tensor, scales: Tensor | None = None) -> Tensor:
        plan = plan_reference(self.rows.batch, self.rows.shape.layout, torch.float64, CPU)
        norms = self.norms and HeadNorms(self.norms.query.double(), self.norms.key.double(), self.norms.epsilon)
        return write_reference(self.qkv.double(), self.cosine.double(), self.sine.double(), cache, plan, norms, scales)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(
    ("shape", "normed"),
    [(Shape(kv_heads=2, group=3), True), (Shape(dim=80, page=32), True), (Shape(kv_heads=3, group=7, dim=128, page=8), False)],
    ids=str,
)
def test_heads_are_turned_and_kept_where_the_tables_say(shape: Shape, normed: bool, dtype: torch.dtype) -> None:
    rows = Rows([(0, 3), (17, 1), (14, 4)], shape, dtype)
    write = Write(rows, normed)
    ours, right = torch.full_like(rows.cache, NAN), torch.full(rows.cache.shape, NAN, dtype=torch.float64)
    before = write.qkv.clone()
    assert relative_error(write.ours(ours), write.right(right)) < TOLERANCES[dtype]
    assert torch.equal(write.qkv, before)
    assert torch.equal(ours.isnan(), right.isnan()), "the slots of the new tokens, and nothing else"
    assert relative_error(ours.nan_to_num(), right.nan_to_num()) < TOLERANCES[dtype]
    kept = ~right[:, 1].isnan()
    assert torch.equal(ours[:, 1][kept].double(), right[:, 1][kept]), "values are left alone, to the bit"


def test_tokens_are_written_beyond_32_bits() -> None:
    rows = Rows([(17, 2)], Shape())
    far, stride = 32_768, 70_000
    memory = torch.frombuffer(mmap.mmap(-1, (far + rows.cache.shape[0]) * stride * 2), dtype=torch.float16)
    cache = memory.as_strided((far + rows.cache.shape[0], *rows.cache.shape[1:]), (stride, *rows.cache.stride()[1:]))
    write, right = Write(rows), torch.zeros(rows.cache.shape, dtype=torch.float64)
    write.right(right)
    object.__setattr__(rows.batch, "tables", rows.batch.tables + far)
    write.ours(cache)
    assert relative_error(cache[far:], right) < 1e-3


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "architecture"), [(torch.float32, "sm_90"), (torch.float16, "sm_80"), (torch.bfloat16, "sm_90")], ids=str
)
def test_caches_of_eight_bits(form: torch.dtype, dtype: torch.dtype, architecture: str) -> None:
    """What is written, and attention over it: to decodes and chunks, with fp8 known to the hardware (sm_90) or not."""
    rows = Rows([(0, 17), (0, 2), (0, 1)], Shape(kv_heads=2, group=3), dtype)
    write, shape = Write(rows, normed=True), rows.cache.shape
    ours, scales = torch.zeros(shape, dtype=form), torch.full(shape[:-1], NAN)
    right, right_scales = torch.zeros(shape, dtype=form), torch.full(shape[:-1], NAN)
    with pretend(architecture):
        write.ours(ours, scales)
        write.right(right, right_scales)
        written = ~right_scales.isnan()
        assert torch.equal(~scales.isnan(), written)
        assert relative_error(scales[written], right_scales[written]) < 1e-6
        assert float((ours.float() != right.float()).double().mean()) < 1e-3, "ties aside"
        exact = dequantize_heads(right, right_scales.nan_to_num(), torch.float64)
        assert relative_error(dequantize_heads(ours, scales.nan_to_num(), torch.float64), exact) < 2e-3
        plan = plan_reference(rows.batch, rows.shape.layout, torch.float64, CPU)
        wanted = attention_reference(rows.queries.double(), ours, plan, 0.125, None, scales.nan_to_num())
        assert relative_error(paged_attention(rows.queries, ours, rows.plan(), 0.125, None, scales), wanted) < TOLERANCES[dtype]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_eight_bits_keep_a_head_whatever_its_size(form: torch.dtype) -> None:
    heads = torch.randn(6, 128, dtype=torch.float64) * torch.tensor([1e-6, 1e-2, 1.0, 1e2, 1e4, 0.0], dtype=torch.float64)[:, None]
    codes, scales = quantize_heads(heads, form)
    assert float(codes.float().abs().max()) == LARGEST[form] and float(scales[5]) == 0
    error = (dequantize_heads(codes, scales, torch.float64) - heads).norm(dim=-1)[:5] / heads.norm(dim=-1)[:5]
    assert float(error.max()) < (0.01 if form is torch.int8 else 0.04)


@triton.jit
def _bits_kernel(x, out, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, e4m3_bits(tl.load(x + place)))


def test_every_e4m3_is_rounded_as_ieee_rounds() -> None:
    """All codes, all midpoints between neighbours, and what lies just beside those."""
    codes = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    x = torch.cat((codes, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), torch.rand(135) * 448))
    x = torch.cat((x, -x))[:1024]
    out = torch.empty(1280, dtype=torch.uint8)
    padded = torch.cat((x, x.new_zeros(1280 - x.numel())))
    _bits_kernel[(5,)](padded, out, 256)
    assert torch.equal(out.view(torch.float8_e4m3fn).float(), padded.to(torch.float8_e4m3fn).float())


def test_bytes_are_what_the_docstring_counts() -> None:
    shape = Shape(kv_heads=2, group=4)
    rows = Rows([(0, 40), (3, 1)], shape)
    write = Write(rows)
    with counted() as traffic:
        write.ours(rows.cache)
    heads, size = 8, 2
    told = 41 * ((heads + 4) * 64 * size + heads * 64 * size + 4 * 64 * size + 64 * 4)
    assert traffic.moved - told == 41 * 8, "and the slots"


def test_what_cannot_be_written_is_said() -> None:
    rows = Rows([(0, 3)], Shape())
    write = Write(rows)
    with pytest.raises(ValueError, match="the cache has 1 pages"):
        object.__setattr__(rows.batch, "tables", rows.batch.tables * 0 + 1)
        write.ours(rows.cache[:1])
    with pytest.raises(KernelError, match="a cache of int8 without scales for float16"):
        write.ours(rows.cache.to(torch.int8))
    with pytest.raises(KernelError, match="a cache of float16 with scales"):
        write.ours(rows.cache, torch.zeros(rows.cache.shape[:-1]))
    with pytest.raises(ValueError, match="cache_scales"):
        write.ours(rows.cache.to(torch.int8), torch.zeros(3))
    write.cosine = write.cosine.double()
    with pytest.raises(ValueError, match="float64, wanted float32"):
        write.ours(rows.cache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.float32], ids=str)
@pytest.mark.parametrize("width", [1, 7, 1100])
def test_pages_are_copied_in_order(dtype: torch.dtype, width: int) -> None:
    pool = torch.randint(0, 100, (2, 6, 2, width)).to(dtype)
    right, bits = pool.clone(), pool.view(torch.uint8)
    pairs = [(0, 1), (4, 3), (1, 2), (3, 0), (2, 1)]
    copy_reference(right.view(torch.uint8), pairs)
    copy_blocks(pool, pairs)
    assert torch.equal(bits, right.view(torch.uint8))
    copy_blocks(pool, [])


def test_pages_of_a_pool_are_copied_where_they_are() -> None:
    """A part of a larger pool: strides of layers and pages are its own."""
    whole = torch.randn(3, 10, 2, 40).to(torch.float16)
    before, pool = whole.clone(), whole[1:, 2:8]
    copy_blocks(pool, [(0, 5)])
    before[1:, 7] = before[1:, 2]
    assert torch.equal(whole, before)


def test_a_run_is_cut_where_order_matters() -> None:
    assert independent_runs([(0, 1), (0, 2), (3, 4)]) == [[(0, 1), (0, 2), (3, 4)]]
    assert independent_runs([(0, 1), (1, 2), (4, 3)]) == [[(0, 1)], [(1, 2), (4, 3)]]
    assert independent_runs([(1, 2), (0, 1)]) == [[(1, 2)], [(0, 1)]], "what is read is not overwritten beside it"
    assert independent_runs([(0, 1), (2, 1)]) == [[(0, 1)], [(2, 1)]]


@pytest.mark.parametrize("pair", [(0, 6), (-1, 2)])
def test_pages_that_a_pool_has_not_are_refused(pair: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="of a pool of 6"):
        copy_blocks(torch.zeros(2, 6, 4), [pair])


def test_a_copy_moves_its_bytes_twice() -> None:
    pool = torch.randn(2, 6, 2, 40)
    with counted() as traffic:
        copy_blocks(pool, [(0, 1), (2, 3)])
    assert traffic.moved - 2 * 2 * 2 * 80 * 4 == 2 * 2 * 4, "and the pairs"
