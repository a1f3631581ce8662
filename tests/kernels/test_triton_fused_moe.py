"""Layers of experts: routing, and Triton's interpreter against float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.reference.fused_moe as reference_file
import kernels.triton.fused_moe as file
import kernels.triton.moe_routing as routing_file
import tests.kernels.triton_interpreter  # noqa: F401  kernels are interpreted
from kernels.reference.fused_moe import fused_moe as reference
from kernels.reference.fused_moe import route
from kernels.triton.moe_routing import route_tokens
from kernels.triton.tiles import pretend
from tests.kernels.mutation import mutated
from tests.kernels.paged_rows import Poison, relative_error
from tests.kernels.triton_memory import counted

pytestmark = pytest.mark.patient

# Two products and a sum, with a rounding to the dtype after each.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    with Poison():
        yield


class Layer:
    """E experts of H → I → H, random."""

    def __init__(self, tokens: int, dtype: torch.dtype = torch.float32, experts: int = 5, width: int = 100, inner: int = 72) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(dtype)

        self.hidden = normal(tokens, width)
        self.logits = normal(tokens, experts)
        self.gate_up = normal(experts, 2 * inner, width, scale=width**-0.5)
        self.down = normal(experts, width, inner, scale=inner**-0.5)

    def ours(self, top_k: int, renormalize: bool = True, rows: slice = slice(None)) -> Tensor:
        hidden, logits = self.hidden[rows].contiguous(), self.logits[rows].contiguous()
        return file.fused_moe(hidden, logits, self.gate_up, self.down, top_k, renormalize)

    def right(self, top_k: int, renormalize: bool = True) -> Tensor:
        return reference(self.hidden.double(), self.logits.double(), self.gate_up.double(), self.down.double(), top_k, renormalize)

    def error(self, top_k: int, renormalize: bool = True) -> float:
        return relative_error(self.ours(top_k, renormalize), self.right(top_k, renormalize))


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "renormalize"), [(1, 2, True), (3, 1, False), (17, 3, True), (24, 2, False)])
def test_experts(tokens: int, top_k: int, renormalize: bool, dtype: torch.dtype) -> None:
    layer = Layer(tokens, dtype)
    ours = layer.ours(top_k, renormalize)
    assert ours.dtype is dtype
    assert relative_error(ours, layer.right(top_k, renormalize)) < TOLERANCES[dtype]


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 32), (torch.bfloat16, 64)], ids=str)
def test_an_expert_of_more_tokens_than_a_block_has(dtype: torch.dtype, rows: int) -> None:
    layer = Layer(rows + 2, dtype, experts=3)
    layer.logits[:, 1] = 9.0
    assert file.TILES.tile("sm_90", dtype).m == rows
    assert layer.error(1) < TOLERANCES[dtype]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100", "gfx942"])
def test_tiles_of_other_architectures(architecture: str) -> None:
    with pretend(architecture):
        assert Layer(9, torch.float16).error(2) < 1e-3


def test_all_tokens_to_one_expert_and_none_to_others() -> None:
    layer = Layer(70)
    layer.logits[:] = torch.tensor([0.0, 0.0, 9.0, 0.0, 0.0])  # and ties: the first of equals
    assert layer.error(1) < 1e-6
    weights, experts = route(layer.logits, 3, True)
    assert experts[0].tolist() == [2, 0, 1] and weights.sum(-1).allclose(torch.ones(70))


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (40, 130, 8), (140, 9, 8)])
def test_entries_are_sorted_by_expert_each_in_order(tokens: int, experts: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(tokens, experts, generator=generator).round(decimals=1)  # with ties
    weights, chosen = route(logits, top_k, True)
    ours = route_tokens(logits, top_k, True, 16)
    assert torch.allclose(ours.weights, weights, rtol=1e-5)
    expected: list[int] = []
    blocks: list[int] = []
    for expert in range(experts):
        own = torch.nonzero(chosen.flatten() == expert)[:, 0].tolist()
        padding = -len(own) % 16
        expected += own + [tokens * top_k] * padding
        blocks += [expert] * ((len(own) + padding) // 16)
    assert ours.block_experts.tolist() == blocks + [-1] * (ours.block_experts.numel() - len(blocks))
    assert ours.entries[: len(expected)].tolist() == expected


def test_a_tokens_nan_stays_with_it() -> None:
    layer = Layer(6)
    good = layer.ours(2)
    layer.logits[1, 3] = float("nan")
    layer.logits[2] = float("nan")
    layer.hidden[4, 7] = float("nan")
    ours = layer.ours(2)
    assert ours[[1, 2, 4]].isnan().all() and torch.equal(ours[[0, 3, 5]], good[[0, 3, 5]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_alone_is_the_token_in_a_batch(dtype: torch.dtype) -> None:
    layer = Layer(70, dtype)
    together = layer.ours(2)
    for row in (0, 33, 69):
        assert torch.equal(layer.ours(2, rows=slice(row, row + 1)), together[row : row + 1])
    assert layer.ours(2, rows=slice(0, 0)).shape == (0, 100)


def test_unused_experts_are_not_read() -> None:
    layer = Layer(3)
    layer.logits[:, 3] = -100.0
    good = layer.ours(2)
    layer.gate_up[3], layer.down[3] = float("nan"), float("nan")
    with counted() as moved:
        assert torch.equal(layer.ours(2), good)
    assert moved.read < 4 * 3 * 72 * 100 * 5 + 20_000, "no more than the five experts' weights, each once"


def test_torch_multiplies_by_the_experts_that_are_used_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[int] = []
    silu_mul = reference_file.silu_mul
    monkeypatch.setattr(reference_file, "silu_mul", lambda x: products.append(x.shape[0]) or silu_mul(x))
    layer = Layer(3, experts=128)
    layer.logits[:, :125] = -100.0
    layer.right(2)
    assert len(products) <= 3 and sum(products) == 6


@pytest.mark.parametrize(
    ("module", "kernel", "old", "new"),
    [
        (file, "up_kernel", "mask=(entry < size)[:, None] & (column < width)", "mask=(entry < size - 1)[:, None] & (column < width)"),
        (file, "combine_kernel", "for slot in range(top_k)", "for slot in range(top_k - 1)"),
        (routing_file, "place_kernel", "tl.cumsum(hit, axis=0) - 1", "tl.cumsum(hit, axis=0) - 1 - (at == size - 1).to(tl.int32)"),
    ],
    ids=["up", "combine", "place"],
)
def test_the_check_sees_what_is_wrong_in_the_last_tile(
    module: Any, kernel: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = mutated_once(module, old, new, tmp_path)
    monkeypatch.setattr(module, kernel, getattr(source, kernel))
    assert not Layer(17).error(2) < 1e-3


def mutated_once(module: Any, old: str, new: str, folder: Path) -> Any:
    """`old` stands in two kernels of one file: the first is changed."""
    text = Path(module.__file__).read_text()
    if text.count(old) == 1:
        return mutated(module, old, new, folder)
    at = text.index(old)
    return mutated(module, text[at - 200 : at] + old, text[at - 200 : at] + new, folder)
