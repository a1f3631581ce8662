"""Paged attention in Triton's interpreter against the reference in float64."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tests.kernels.triton_interpreter  # noqa: F401  kernels are interpreted
from kernels.batch import CacheLayout, PagedBatch
from kernels.errors import KernelError
from kernels.triton import attend, chunk_attention, decode_attention
from kernels.triton.attention_plan import plan_attention
from kernels.triton.paged_attention import paged_attention
from kernels.triton.tiles import pretend
from tests.kernels.mutation import mutated
from tests.kernels.paged_rows import CPU, NAN, TOLERANCES, Poison, Rows, Shape, relative_error
from tests.kernels.triton_memory import counted

pytestmark = pytest.mark.patient

DTYPES = list(TOLERANCES)


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    with Poison():
        assert torch.empty(3).isnan().all(), "what is not written must show"
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decodes_of_every_length(dtype: torch.dtype) -> None:
    """1, a page − 1, a page, a page + 1; one split exactly, one and a token, several."""
    rows = Rows([(length - 1, 1) for length in (1, 15, 16, 17, 256, 257, 700)], Shape(group=4), dtype)
    assert rows.plan().decodes.rows.numel() == 5 + 2 + 3
    assert rows.error() < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_beside_decodes(dtype: torch.dtype) -> None:
    rows = Rows([(0, 16), (30, 1), (5, 18), (0, 2), (100, 70), (300, 1)], Shape(kv_heads=2, group=3), dtype)
    assert rows.error() < TOLERANCES[dtype]


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_groups(group: int) -> None:
    assert Rows([(20, 1), (5, 18), (64, 65), (299, 1)], Shape(kv_heads=2, group=group)).error() < 1e-3


def test_long_chunks() -> None:
    assert Rows([(1, 1328), (5, 18), (129, 463)], Shape(group=2)).error() < 1e-3


@pytest.mark.parametrize(("dim", "page"), [(80, 16), (96, 32), (128, 8), (256, 16), (32, 48)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_head_dims_and_pages(dim: int, page: int, dtype: torch.dtype) -> None:
    assert Rows([(0, 1), (page, 1), (3, page + 2)], Shape(dim=dim, page=page), dtype).error() < TOLERANCES[dtype]


@pytest.mark.parametrize("architecture", ["sm_80", "gfx942"])
def test_tiles_of_other_architectures(architecture: str) -> None:
    with pretend(architecture):
        assert Rows([(300, 1), (70, 90)], Shape(group=3)).error() < 1e-3


@pytest.mark.parametrize("window", [1, 15, 17, 64, 290, 5000])
def test_nothing_below_the_window_is_read(window: int) -> None:
    rows = Rows([(40, 1), (2, 5), (0, 1), (400, 1), (600, 1), (140, 60)], Shape(group=3))
    for row, (start, _) in enumerate(rows.lengths):
        below = max(0, start + 1 - window)
        for page in range(below // 16 + 1):
            rows.cache[int(rows.batch.tables[row, page]), :, :, : max(0, min(16, below - page * 16))] = NAN
    assert rows.error(window) < 1e-3
    assert relative_error(rows.right(window), rows.right()) > 1e-3 or window == 5000, "without a window it would be another result"


@pytest.mark.parametrize(("dtype", "cap"), [(torch.float32, 50.0), (torch.float32, 1.0), (torch.bfloat16, 30.0)], ids=str)
def test_capped_scores(dtype: torch.dtype, cap: float) -> None:
    rows = Rows([(290, 1), (9, 30)], Shape(group=3), dtype)
    rows.queries *= 8
    assert relative_error(rows.right(cap=cap), rows.right()) > 1e-2
    assert rows.error(None, cap) < TOLERANCES[dtype]
    assert rows.error(20, cap) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(dtype: torch.dtype, window: int | None) -> None:
    rows = Rows([(600, 1), (3, 37), (20, 1), (0, 60), (290, 1)], Shape(group=3), dtype)
    batched = rows.ours(window)
    for row, part in enumerate(batched.split([count for _, count in rows.lengths])):
        assert torch.equal(rows.alone(row).ours(window), part), rows.lengths[row]


def test_pages_beyond_32_bits() -> None:
    """Pages of a cache that lies so thinly in memory that their elements are counted in 64 bits."""
    rows = Rows([(40, 1), (5, 18)], Shape())
    far, stride = 32_768, 70_000
    memory = torch.frombuffer(mmap.mmap(-1, (far + rows.cache.shape[0]) * stride * 2), dtype=torch.float16)
    cache = memory.as_strided((far + rows.cache.shape[0], *rows.cache.shape[1:]), (stride, *rows.cache.stride()[1:]))
    cache[far:] = rows.cache
    right, rows.cache = rows.right(), cache
    rows.batch = PagedBatch(rows.batch.starts, rows.batch.counts, rows.batch.tables + far)
    assert (far - 1) * stride > 2**31
    assert relative_error(rows.ours(), right) < 1e-3


def test_work_may_be_padded_with_rows_that_are_none() -> None:
    """A graph's grid is fixed: what it has too much does nothing."""
    rows = Rows([(600, 1), (20, 1), (300, 1)], Shape())
    plan, plain = rows.plan(), rows.ours()
    for field in ("rows", "reduced_rows"):
        short = getattr(plan.decodes, field)
        object.__setattr__(plan.decodes, field, torch.cat((short, torch.full((2,), -1, dtype=torch.int32))))
    assert torch.equal(paged_attention(rows.queries, rows.cache, plan, 64**-0.5), plain)


def test_bytes_and_operations_are_what_the_docstring_counts() -> None:
    shape = Shape(kv_heads=2, group=4)
    rows = Rows([(599, 1), (299, 1), (15, 1)], shape)
    plan = rows.plan()
    with counted() as traffic:
        paged_attention(rows.queries, rows.cache, plan, 0.1)
    assert traffic.launches == ["split_kernel", "reduce_kernel"]
    keys, heads = 600 + 300 + 16, 8
    told = keys * 2 * 2 * 64 * 2 + 2 * 3 * heads * 64 * 2 + 2 * 5 * heads * (64 + 1) * 4
    bookkeeping = traffic.moved - told
    assert 0 <= bookkeeping < 0.01 * told, "tables and work lists"
    tile_rows, tile_keys = 16, 10 * 64 + 5 * 64 + 64  # what a matrix instruction takes, in whole tiles
    assert traffic.operations == 4 * tile_keys * shape.kv_heads * tile_rows * 64


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(keys < end)", "(keys < (end - 1) // PAGE * PAGE + 1)"),  # one key of the last page
        ("lane = head * PAGE + keys % PAGE", "lane = head * PAGE + keys % PAGE - (keys // PAGE == (end - 1) // PAGE) * (keys % PAGE)"),
        ("seen = (keys >= low) & (keys < end)", "seen = keys < (end + PAGE - 1) // PAGE * PAGE"),  # reads on to the end of the page
        ("keys[None, :] <= positions[:, None]", "keys[None, :] <= positions[:, None] + 1"),
    ],
    ids=["forgets", "misplaces", "reads on", "looks ahead"],
)
def test_the_check_sees_a_kernel_that_is_wrong_in_the_last_page(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows([(300, 1), (64, 1), (600, 40)], Shape())
    assert rows.error() < 1e-3
    wrong = mutated(attend, old, new, tmp_path).attend
    for kernels in (decode_attention, chunk_attention):
        monkeypatch.setattr(kernels, "attend", wrong)
    assert not rows.error() < 1e-3


def test_what_cannot_be_served_is_said() -> None:
    rows = Rows([(20, 1)], Shape())
    plan = rows.plan()
    with pytest.raises(ValueError, match="page 4 is named, the cache has 4 pages"):
        paged_attention(rows.queries, rows.cache[: plan.page_limit - 1], plan, 0.1)
    with pytest.raises(ValueError, match="queries"):
        paged_attention(rows.queries[:, 1:], rows.cache, plan, 0.1)
    with pytest.raises(ValueError, match="both above 0"):
        paged_attention(rows.queries, rows.cache, plan, -0.1)
    for scale, cap in ((NAN, None), (float("inf"), None), (0.1, NAN), (0.1, 0.0), (0.1, float("inf"))):
        with pytest.raises(ValueError, match="both above 0 and finite"):
            paged_attention(rows.queries, rows.cache, plan, scale, cap)
    with pytest.raises(ValueError, match="the plan's are contiguous"):
        paged_attention(rows.queries, rows.cache.transpose(2, 3), plan, 0.1)
    with pytest.raises(KernelError, match="a cache of float32 without scales for queries of float16"):
        paged_attention(rows.queries, rows.cache.float(), plan, 0.1)
    with pytest.raises(KernelError, match="float64 on sm_90"):
        plan_attention(rows.batch, rows.shape.layout, torch.float64, CPU)
    with pytest.raises(KernelError, match="sizes up to 256"):
        plan_attention(rows.batch, Shape(dim=512).layout, torch.float16, CPU)


@pytest.mark.parametrize(
    ("start", "count", "page", "window", "message"),
    [
        (-1, 1, 0, None, "from position 0"),
        (0, 0, 0, None, "at least one token"),
        (30, 3, 0, None, "reaches position 32"),
        (0, 1, -2, None, "page -2"),
        (0, 1, 0, 0, "window: 0"),
        (0, 1, 0, 1 << 31, "window: 2147483648"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(start: int, count: int, page: int, window: int | None, message: str) -> None:
    batch = PagedBatch(np.array([start], np.int32), np.array([count], np.int32), np.array([[page, 1]], np.int32))
    with pytest.raises(ValueError, match=message):
        plan_attention(batch, Shape().layout, torch.float16, CPU, window)


@pytest.mark.parametrize(
    ("shapes", "layout", "message"),
    [
        (((2,), (2,), (2, 1)), CacheLayout(1, 16, 16), ""),
        (((2,), (1,), (2, 1)), CacheLayout(1, 16, 16), r"starts, counts and tables of \[2\], \[1\], \[2, 1\]"),
        (((2,), (2,), (1, 1)), CacheLayout(1, 16, 16), "starts, counts and tables"),
        (((2,), (2,), (2,)), CacheLayout(1, 16, 16), "starts, counts and tables"),
        (((2,), (2,), (2, 0)), CacheLayout(1, 16, 16), "0 pages of 16 tokens a row"),
        (((0,), (0,), (0, 1)), CacheLayout(1, 16, 16), "needs rows"),
        (((2,), (2,), (2, 1)), CacheLayout(0, 16, 16), "layout: "),
        (((2,), (2,), (2, 1)), CacheLayout(1, 0, 16), "layout: "),
        (((2,), (2,), (2, 1)), CacheLayout(1, 16, 0), "layout: "),
    ],
)
def test_arrays_that_do_not_fit_each_other_are_refused(shapes: tuple[tuple[int, ...], ...], layout: CacheLayout, message: str) -> None:
    starts, counts, tables = (np.full(shape, value, np.int32) for shape, value in zip(shapes, (0, 1, 0), strict=True))
    if not message:
        plan_attention(PagedBatch(starts, counts, tables), layout, torch.float16, CPU)
        return
    with pytest.raises(ValueError, match=message):
        plan_attention(PagedBatch(starts, counts, tables), layout, torch.float16, CPU)


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_every_size(sign: int) -> None:
    """Also such as lie below any that a model makes: a running maximum begins under all of them."""
    rows = Rows([(20, 1), (300, 1), (0, 3)], Shape(dim=16), torch.float32)
    rows.queries = rows.queries.abs() * sign * 1e16
    rows.cache = rows.cache.abs() * 1e16
    assert rows.error() < 1e-6
