"""The reference operators against formulas written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.batch import CacheLayout, PagedBatch
from kernels.ops import KernelError, choose_operators
from kernels.reference.attention_plan import PADDING_PAGES_MAX, AttentionPlan, plan_attention, split_by_pages
from kernels.reference.copy_blocks import copy_blocks
from kernels.reference.paged_attention import paged_attention
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope_kv_write import HeadNorms, rope_kv_write
from kernels.reference.silu_mul import silu_mul

CPU = torch.device("cpu")
NAN = float("nan")


def relative_error(ours: torch.Tensor, right: torch.Tensor) -> float:
    return float((ours.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_rms_norm_adds_then_normalizes(dtype: torch.dtype, tolerance: float) -> None:
    stream = torch.randn(5, 40, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    delta, weight = torch.randn(5, 40).to(dtype), torch.randn(40).to(dtype)
    summed = stream.double() + delta.double()
    right = summed / (summed.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    normed = rms_norm(stream, weight, 1e-5, delta)
    assert normed.dtype is dtype and relative_error(normed, right) < tolerance
    assert relative_error(stream, summed) < 1e-6, "the stream keeps the sum"


def test_rms_norm_without_delta_leaves_the_stream() -> None:
    stream = torch.randn(3, 8)
    before = stream.clone()
    rms_norm(stream, torch.ones(8), 1e-5)
    assert torch.equal(stream, before)


def test_silu_mul() -> None:
    gate_up = torch.randn(7, 24, dtype=torch.float64)
    gate, up = gate_up[:, :12].clone(), gate_up[:, 12:].clone()
    before = gate_up.clone()
    assert relative_error(silu_mul(gate_up), gate / (1 + (-gate).exp()) * up) < 1e-12
    assert torch.equal(gate_up, before)


def test_copies_happen_in_order() -> None:
    pool = torch.arange(5.0).repeat(2, 1)[:, :, None]
    copy_blocks(pool, [(0, 1), (1, 2), (4, 3)])  # 2 gets what 1 got from 0
    assert pool[0, :, 0].tolist() == [0, 0, 0, 4, 4] and torch.equal(pool[0], pool[1])
    copy_blocks(pool, [(3, 0), (2, 1)])
    assert pool[1, :, 0].tolist() == [4, 0, 0, 4, 4]
    copy_blocks(pool, [])


class Paged:
    """Rows with known keys and values, laid into shuffled pages; everything else in the cache is NaN."""

    def __init__(self, lengths: list[tuple[int, int]], kv_heads: int, group: int, dtype: torch.dtype = torch.float64) -> None:
        self.layout = CacheLayout(kv_heads, 4, 6)
        self.starts = [start for start, _ in lengths]
        self.counts = [count for _, count in lengths]
        pages = [-(-(start + count) // 4) for start, count in lengths]
        order = np.random.default_rng(1).permutation(sum(pages) + 3)
        self.cache = torch.full((order.size, 2, kv_heads, 4, 6), NAN, dtype=dtype)
        self.tables = np.zeros((len(lengths), max(pages)), np.int32)
        used = 0
        for index, count in enumerate(pages):
            self.tables[index] = order[used]
            self.tables[index, :count] = order[used : used + count]
            used += count
            self.cache[order[used - count : used].copy()] = 0
        total = [start + count for start, count in lengths]
        self.keys = [torch.randn(n, kv_heads, 6, dtype=dtype) for n in total]
        self.values = [torch.randn(n, kv_heads, 6, dtype=dtype) for n in total]
        self.queries = torch.randn(sum(self.counts), kv_heads * group, 6, dtype=dtype)

    def batch(self) -> PagedBatch:
        return PagedBatch(np.array(self.starts, np.int32), np.array(self.counts, np.int32), self.tables)

    def plan(self, window: int | None = None) -> AttentionPlan:
        return plan_attention(self.batch(), self.layout, self.queries.dtype, CPU, window)

    def write(self) -> None:
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            for position in range(keys.shape[0]):
                page, slot = int(self.tables[index, position // 4]), position % 4
                self.cache[page, 0, :, slot], self.cache[page, 1, :, slot] = keys[position], values[position]

    def right(self, scale: float, window: int | None = None) -> torch.Tensor:
        outs, at = [], 0
        for start, count, keys, values in zip(self.starts, self.counts, self.keys, self.values, strict=True):
            for offset in range(count):
                seen = slice(0 if window is None else max(0, start + offset + 1 - window), start + offset + 1)
                query = self.queries[at].view(self.layout.kv_heads, -1, 6).double()
                scores = torch.einsum("hgd,khd->hgk", query, keys[seen].double()) * scale
                outs.append(torch.einsum("hgk,khd->hgd", scores.softmax(-1), values[seen].double()).reshape(-1))
                at += 1
        return torch.stack(outs)


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize(
    "lengths",
    [
        [(0, 1)],
        [(3, 1), (4, 1), (5, 1), (0, 1)],  # page − 1, page, page + 1
        [(0, 9)],
        [(11, 6)],
        [(40, 1), (2, 5), (7, 1), (0, 13), (400, 1)],
        [(600, 1), (1, 1), (2, 1)],
    ],
    ids=str,
)
def test_attention_over_shuffled_pages(lengths: list[tuple[int, int]], group: int) -> None:
    torch.manual_seed(0)
    paged = Paged(lengths, kv_heads=2, group=group)
    paged.write()
    out = paged_attention(paged.queries.flatten(1), paged.cache, paged.plan(), 0.4)
    assert relative_error(out, paged.right(0.4)) < 1e-12


@pytest.mark.parametrize("window", [1, 3, 4, 5, 13, 1000])
def test_a_window_hides_what_lies_before_it(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages, tiles and rows of every kind; what no query of a row may see is NaN, as far as whole pages go."""
    monkeypatch.setattr("kernels.reference.attention_plan.QUERY_TILE", 7)
    torch.manual_seed(0)
    paged = Paged([(40, 1), (2, 5), (7, 1), (0, 13), (400, 1), (61, 20), (0, 1), (3, 1)], kv_heads=2, group=3)
    paged.write()
    for row, start in enumerate(paged.starts):
        for page in range(max(0, start + 1 - window) // 4):
            paged.cache[int(paged.tables[row, page])] = NAN
    out = paged_attention(paged.queries.flatten(1), paged.cache, paged.plan(window), 0.4)
    assert relative_error(out, paged.right(0.4, window)) < 1e-12
    if window < 400:
        assert relative_error(out.nan_to_num(), paged.right(0.4)) > 1e-3, "without a window it would be another result"


def test_a_window_reads_only_its_pages() -> None:
    paged = Paged([(4000, 1), (3, 1)], kv_heads=1, group=1)
    assert sum(group.pages.numel() for group in paged.plan(8).groups) < 20 < sum(group.pages.numel() for group in paged.plan().groups)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_attention_in_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    paged = Paged([(70, 1), (9, 1), (30, 20)], kv_heads=3, group=3, dtype=dtype)
    paged.write()
    out = paged_attention(paged.queries.flatten(1), paged.cache, paged.plan(), 0.4)
    assert relative_error(out, paged.right(0.4)) < tolerance


def test_long_chunks_go_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.reference.attention_plan.QUERY_TILE", 5)
    torch.manual_seed(0)
    paged = Paged([(6, 17), (0, 11)], kv_heads=1, group=2)
    paged.write()
    plan = paged.plan()
    assert [tile.count for tile in plan.tiles] == [5, 5, 5, 2, 5, 5, 1]
    assert relative_error(paged_attention(paged.queries.flatten(1), paged.cache, plan, 0.4), paged.right(0.4)) < 1e-12


def test_a_neighbours_nan_stays_with_it_only_because_padding_is_a_rows_own() -> None:
    torch.manual_seed(0)
    paged = Paged([(30, 1), (2, 1)], kv_heads=1, group=1)
    paged.write()
    paged.cache[int(paged.tables[0, 0])] = NAN
    out = paged_attention(paged.queries.flatten(1), paged.cache, paged.plan(), 0.4)
    assert out[0].isnan().all() and relative_error(out[1], paged.right(0.4)[1]) < 1e-12
    paged.tables[1, 1:] = paged.tables[0, 0]  # the guard off: padded with a page of the neighbour
    assert paged_attention(paged.queries.flatten(1), paged.cache, paged.plan(), 0.4)[1].isnan().all()


def test_rope_rotates_pairs_and_writes_where_the_tables_say() -> None:
    torch.manual_seed(0)
    paged = Paged([(3, 4), (0, 1), (9, 1)], kv_heads=2, group=2)
    heads, dim = 4, 6
    qkv = torch.randn(6, (heads + 4) * dim, dtype=torch.float64)
    angles = torch.randn(6, dim // 2, dtype=torch.float64)
    cosine, sine = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    before = qkv.clone()
    queries = rope_kv_write(qkv, cosine, sine, paged.cache, paged.plan())
    assert torch.equal(qkv, before)
    split = before.view(6, heads + 4, dim)
    pairs = torch.complex(split[..., : dim // 2], split[..., dim // 2 :]) * torch.exp(1j * angles)[:, None]
    turned = torch.cat((pairs.real, pairs.imag), -1)
    assert relative_error(queries, turned[:, :heads].flatten(1)) < 1e-12
    for token, (row, position) in enumerate([(0, 3), (0, 4), (0, 5), (0, 6), (1, 0), (2, 9)]):
        page = paged.cache[int(paged.tables[row, position // 4])]
        assert torch.allclose(page[0, :, position % 4], turned[token, heads : heads + 2])
        assert torch.equal(page[1, :, position % 4], split[token, heads + 2 :])
    assert int((~paged.cache.isnan()).all(-1).sum()) == int(sum(-(-n // 4) for n in (7, 1, 10))) * 2 * 2 * 4, "nothing else is touched"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_heads_are_normalised_before_they_are_rotated(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    paged = Paged([(3, 4), (9, 1)], kv_heads=2, group=2, dtype=dtype)
    heads, dim = 4, 6
    qkv = torch.randn(5, (heads + 4) * dim).to(dtype)
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    angles = torch.randn(5, dim // 2, dtype=exact)
    cosine, sine = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    norms = HeadNorms(torch.rand(dim).to(dtype) + 0.5, torch.rand(dim).to(dtype) + 0.5, 1e-3)
    queries = rope_kv_write(qkv, cosine, sine, paged.cache, paged.plan(), norms)
    split = qkv.view(5, heads + 4, dim).double()
    normed = split / (split.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    normed[:, :heads] *= norms.query.double()
    normed[:, heads : heads + 2] *= norms.key.double()
    pairs = torch.complex(normed[..., : dim // 2], normed[..., dim // 2 :]) * torch.exp(1j * angles.double())[:, None]
    turned = torch.cat((pairs.real, pairs.imag), -1)
    assert queries.dtype is dtype and relative_error(queries, turned[:, :heads].flatten(1)) < tolerance
    page = paged.cache[int(paged.tables[1, 9 // 4])]
    assert relative_error(page[0, :, 1], turned[4, heads : heads + 2]) < tolerance
    assert torch.equal(page[1, :, 1].double(), split[4, heads + 2 :]), "values are left alone"


def test_groups_of_decodes_bound_their_padding() -> None:
    pages = np.array([500, 1, 2, 1, 480, 3, 60, 55], np.int32)
    groups = split_by_pages(np.arange(8), pages)
    assert sorted(int(i) for group in groups for i in group) == list(range(8))
    for group in groups:
        own = int(pages[group].sum())
        assert int(pages[group].max()) * len(group) - own <= own // 4 + PADDING_PAGES_MAX
    assert [sorted(pages[group].tolist()) for group in groups] == [[480, 500], [3, 55, 60], [1, 1, 2]]
    assert split_by_pages(np.arange(0), pages) == []


def test_operators_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_operators(CPU).name == "reference"
    monkeypatch.setenv("RANTANG_KERNELS", "refrence")
    with pytest.raises(KernelError, match="refrence: unknown kernels"):
        choose_operators(CPU)
