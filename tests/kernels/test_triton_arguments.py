"""Arguments that do not fit are refused by name before anything is launched, also by `python -O`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.triton
import tests.kernels.triton_interpreter  # noqa: F401  kernels are interpreted
from kernels.reference.quantized_weight import pack_groups, quantize_fp8, quantize_int4, quantize_int8
from kernels.reference.rope_kv_write import HeadNorms
from kernels.reference.sampling import SamplingRows, TokenLists
from kernels.triton.arguments import ask
from kernels.triton.copy_blocks import copy_blocks
from kernels.triton.fused_moe import fused_moe
from kernels.triton.gelu_mul import gelu_mul
from kernels.triton.linear_quantized import linear_quantized
from kernels.triton.matmul_batch_invariant import matmul_batch_invariant
from kernels.triton.paged_attention import paged_attention
from kernels.triton.rms_norm import rms_norm
from kernels.triton.rope_kv_write import rope_kv_write
from kernels.triton.sampling import sampling
from kernels.triton.silu_mul import silu_mul
from tests.kernels.paged_rows import Rows, Shape
from tests.kernels.triton_memory import counted

VOCAB = 40
FLAT = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
ATTENDED = Rows([(5, 1), (0, 2)], Shape(dim=16))


def of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def turned(rows: int, columns: int) -> Tensor:
    """The shape that is wanted, columns lying together."""
    return of(columns, rows).T


INT4, FP8 = quantize_int4(of(8, 40)), quantize_fp8(of(8, 40))
ROWS = SamplingRows(FLAT, torch.zeros(1, 4, dtype=torch.int64))
LIST = TokenLists(torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), torch.zeros(3))
WORDS, EXPERTS = of(1, 2, dtype=torch.int32), (of(3, 16), of(3, 4), of(4, 64, 16), of(4, 16, 32))


def experts(top_k: int = 2, **changed: Tensor) -> Tensor:
    names = ("hidden", "router_logits", "gate_up", "down")
    return fused_moe(*(changed.get(name, each) for name, each in zip(names, EXPERTS, strict=True)), top_k)


def sampled(top: int = 0, logits: Tensor | None = None, **changed: Any) -> Any:
    return sampling(of(1, VOCAB) if logits is None else logits, replace(ROWS, **changed), top)


def turn(weights: tuple[Tensor, Tensor]) -> Tensor:
    angles = of(3, 16)
    return rope_kv_write(of(3, 64).half(), angles, angles, ATTENDED.cache, ATTENDED.plan(), HeadNorms(*weights, 1e-5))


def attended(queries: Tensor, cache: Tensor) -> Tensor:
    return paged_attention(queries, cache, ATTENDED.plan(), 0.1)


FINE: dict[str, Callable[[], object]] = {
    "rms_norm": lambda: rms_norm(of(3, 40), of(40).half(), 1e-5, of(3, 40).half()),
    "silu_mul": lambda: silu_mul(of(3, 40)),
    "gelu_mul": lambda: gelu_mul(of(3, 40)),
    "matmul_batch_invariant": lambda: matmul_batch_invariant(of(3, 40), of(8, 40), of(8)),
    "linear_quantized": lambda: linear_quantized(of(3, 40), INT4, of(8)),
    "fused_moe": experts,
    "sampling": lambda: sampled(2, allowed=WORDS, prompt_seen=WORDS, output_counts=of(1, VOCAB, dtype=torch.int32), bias=LIST, banned=LIST),
    "rope_kv_write": lambda: turn((of(16).half(), of(16).half())),
    "paged_attention": lambda: attended(ATTENDED.queries, ATTENDED.cache),
    "copy_blocks": lambda: copy_blocks(of(2, 4, 8), [(0, 1)]),
}
WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: rms_norm(of(40), of(40), 1e-5), ValueError, "residual: .* wanted a contiguous matrix"),
    (lambda: rms_norm(turned(3, 40), of(40), 1e-5), ValueError, "residual: .* of strides .1, 3., wanted a contiguous matrix"),
    (lambda: rms_norm(of(3, 40).half(), of(40), 1e-5), TypeError, "residual: torch.float16, wanted torch.float32"),
    (lambda: rms_norm(of(3, 40), of(39), 1e-5), ValueError, r"weight: \[39\] .* wanted contiguous \[40\]"),
    (lambda: rms_norm(of(3, 40), of(80)[::2], 1e-5), ValueError, "weight: .* of strides .2., wanted contiguous"),
    (lambda: rms_norm(of(3, 40), of(40), 1e-5, of(2, 40)), ValueError, "delta"),
    (lambda: rms_norm(of(3, 40), of(40), 1e-5, turned(3, 40)), ValueError, "delta"),
    (lambda: rms_norm(of(3, 40), of(40), 1e-5, of(3, 40, dtype=torch.bool)), TypeError, "delta: torch.bool, wanted torch.float32, torch"),
    (lambda: silu_mul(of(3, 41)), ValueError, "gate_up: 41 columns, wanted an even number"),
    (lambda: silu_mul(turned(3, 40)), ValueError, "gate_up"),
    (lambda: gelu_mul(of(3, 41)), ValueError, "gate_up: 41 columns"),
    (lambda: gelu_mul(of(3, 4, 2)), ValueError, "gate_up"),
    (lambda: gelu_mul(of(3, 40), "fast"), ValueError, "approximate: 'fast', wanted one of tanh, none"),
    (lambda: matmul_batch_invariant(turned(3, 40), of(8, 40)), ValueError, "x: "),
    (lambda: matmul_batch_invariant(of(3, 40), of(8, 41)), ValueError, "weight: "),
    (lambda: matmul_batch_invariant(of(3, 40), of(40)), ValueError, "weight: "),
    (lambda: matmul_batch_invariant(of(3, 40), of(8, 40).half()), TypeError, "weight: torch.float16, wanted torch.float32"),
    (lambda: matmul_batch_invariant(of(3, 40), of(8, 40), of(7)), ValueError, "bias: "),
    (lambda: matmul_batch_invariant(of(3, 40), of(8, 40), of(8).half()), TypeError, "bias: "),
    (lambda: linear_quantized(of(3, 41), INT4), ValueError, "x: "),
    (lambda: linear_quantized(turned(3, 40), INT4), ValueError, "x: "),
    (lambda: linear_quantized(of(3, 40), replace(INT4, form="int3")), ValueError, "form 'int3', wanted one of int8, fp8, int4"),
    (lambda: linear_quantized(of(3, 40), replace(INT4, rows=200)), ValueError, r"weight.values: .* wanted contiguous \[2, 2, 128, 16\]"),
    (lambda: linear_quantized(of(3, 40), replace(INT4, form="int8", minima=None)), ValueError, r"weight.values: .* 128, 32\]"),
    (lambda: linear_quantized(of(3, 40), replace(INT4, minima=None)), ValueError, "weight.minima: none for int4"),
    (lambda: linear_quantized(of(3, 40), replace(FP8, minima=INT4.minima)), ValueError, "weight.minima: given for fp8"),
    (lambda: linear_quantized(of(3, 40), replace(FP8, scales=FP8.scales.half())), TypeError, "weight.scales: torch.float16"),
    (lambda: linear_quantized(of(3, 40), INT4, of(9)), ValueError, "bias: "),
    (lambda: pack_groups(replace_groups(), 100), ValueError, "groups: 2 in a row, but 100 columns are 4 groups of 32"),
    (lambda: experts(hidden=turned(3, 16)), ValueError, "hidden: "),
    (lambda: experts(router_logits=of(2, 4)), ValueError, "router_logits: "),
    (lambda: experts(router_logits=of(3, 5)), ValueError, "router_logits: "),
    (lambda: experts(gate_up=of(4, 64, 17)), ValueError, "gate_up: "),
    (lambda: experts(gate_up=of(64, 16)), ValueError, "gate_up: "),
    (lambda: experts(down=of(4, 16, 31)), ValueError, "down: "),
    (lambda: experts(down=of(4, 16, 32).half()), TypeError, "down: "),
    (lambda: experts(0), ValueError, "top_k: 0 of 4 experts"),
    (lambda: experts(5), ValueError, "top_k: 5 of 4 experts"),
    (lambda: experts(router_logits=of(3, 4, dtype=torch.int64)), TypeError, "router_logits: "),
    (lambda: sampled(logits=of(1, 0)), ValueError, "wanted at least one token"),
    (lambda: sampled(logits=turned(2, VOCAB)), ValueError, "logits: "),
    (lambda: sampled(-1), ValueError, "top_logprobs: -1, wanted 0 to 40"),
    (lambda: sampled(41), ValueError, "top_logprobs: 41, wanted 0 to 40"),
    (lambda: sampled(1025, of(1, 5000)), ValueError, "top_logprobs: 1025, wanted 0 to 1024"),
    (lambda: sampled(numbers=FLAT.float()), TypeError, "numbers: "),
    (lambda: sampled(numbers=FLAT[:, :5]), ValueError, "numbers: "),
    (lambda: sampled(counts=ROWS.counts.int()), TypeError, "counts: "),
    (lambda: sampled(allowed=WORDS[:, :1]), ValueError, r"allowed: .* wanted contiguous \[1, 2\]"),
    (lambda: sampled(prompt_seen=WORDS.long()), TypeError, "prompt_seen: "),
    (lambda: sampled(output_counts=WORDS), ValueError, "output_counts: "),
    (lambda: sampled(bias=replace(LIST, starts=LIST.starts[:1])), ValueError, "bias.starts: "),
    (lambda: sampled(banned=replace(LIST, tokens=LIST.tokens.long())), TypeError, "banned.tokens: "),
    (lambda: sampled(bias=replace(LIST, values=LIST.values[:2])), ValueError, "bias.values: "),
    (lambda: turn((of(15).half(), of(16).half())), ValueError, "norms.query: "),
    (lambda: turn((of(16).half(), of(32).half()[::2])), ValueError, "norms.key: "),
    (lambda: attended(ATTENDED.queries.T.contiguous().T, ATTENDED.cache), ValueError, "queries: "),
    (lambda: attended(ATTENDED.queries[0], ATTENDED.cache), ValueError, "queries: "),
    (lambda: attended(ATTENDED.queries, ATTENDED.cache[:0]), ValueError, "the cache has 0 pages"),
    (lambda: attended(ATTENDED.queries, ATTENDED.cache[:, :1]), ValueError, "cache: "),
    (lambda: copy_blocks(of(2, 4, 8), [(0, 4)]), ValueError, "pairs: page 4 of a pool of 4"),
    (lambda: copy_blocks(of(2, 4, 8).transpose(2, 1), [(0, 1)]), ValueError, "pool: "),
    (lambda: copy_blocks(of(2), [(0, 1)]), ValueError, "pool: "),
]


def replace_groups() -> Any:
    from kernels.reference.quantized_weight import groups_of

    return groups_of(of(8, 64), 8)


@pytest.mark.parametrize("name", FINE)
def test_what_fits_is_served(name: str) -> None:
    """The control: the same arguments, nothing wrong with them."""
    with counted() as traffic:
        FINE[name]()
    assert traffic.launches


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=[f"{at}" for at in range(len(WRONG))])
def test_what_does_not_fit_is_refused_by_name(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with counted() as traffic, pytest.raises(error, match=message):
        call()
    assert traffic.launches == []


def test_a_tensor_on_another_device_is_refused() -> None:
    ask("weight", of(3), (3,), of(3))
    with pytest.raises(ValueError, match="weight: on meta, wanted on cpu"):
        ask("weight", of(3).to("meta"), (3,), of(3))


def asserts(source: str) -> Iterator[int]:
    """Lines of what `python -O` leaves out."""
    return (node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert))


def test_no_check_of_a_kernel_is_left_out_by_python_O() -> None:
    assert list(asserts("def f(x):\n    assert x.ok\n")) == [2], "the control"
    files = sorted(Path(kernels.triton.__file__ or "").parent.glob("*.py"))
    assert len(files) > 15
    assert {file.name: lines for file in files if (lines := list(asserts(file.read_text())))} == {}


def test_quantised_forms_fit_as_they_are_made() -> None:
    for weight in (quantize_int8(of(130, 33)), quantize_fp8(of(130, 33)), quantize_int4(of(1, 1))):
        assert linear_quantized(of(0, weight.columns), weight).shape == (0, weight.rows)
