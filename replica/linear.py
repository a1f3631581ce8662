"""y = x · Wᵀ + b: plain, quantised, packed for the CPU, or one rank's part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.reference.quantized_weight import QuantizedWeight
from replica.parallel.group import TensorParallel

_mkldnn: Any = torch.ops.mkldnn
Weight = Tensor | QuantizedWeight  # [out, in]
Product = Callable[[Tensor, Any, Tensor | None], Tensor]  # x [T, in], the weight that it is made for, bias [out] → [T, out]


class Linear:
    """Weight [out, in], optional bias [out]; x [T, in] → [T, out] in x's dtype. A quantised weight comes with its `product`.

    A bfloat16 weight on a CPU is laid out for oneDNN once (1.3–1.8 × as fast as laying it out in each call); the plain copy is
    then given up. Where oneDNN cannot, and in other dtypes, torch's own matrix multiplication serves; or `product`, where given.
    """

    def __init__(self, weight: Weight, bias: Tensor | None = None, product: Product | None = None) -> None:
        self._bias = bias
        self._product: Product = functional.linear if product is None else product
        self._packed = pack(weight) if product is None and isinstance(weight, Tensor) else None
        self._weight = weight if self._packed is None else None

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            out: Tensor = _mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
            return out
        assert self._weight is not None
        return self._product(x, self._weight, self._bias)


class ReducedLinear(Linear):
    """Split along the input (row-parallel): every rank's part of the sum is added up over the group."""

    def __init__(self, weight: Weight, tp: TensorParallel, bias: Tensor | None = None, product: Product | None = None) -> None:
        super().__init__(weight, bias if tp.rank == 0 else None, product)  # a bias is added once
        self._tp = tp

    def __call__(self, x: Tensor) -> Tensor:
        out = super().__call__(x)
        return out if self._tp.size == 1 else self._tp.all_reduce(out)


class VocabularyHead:
    """Hidden states to logits over the whole vocabulary, in float32, on every rank; each holds a slice of the rows.

    oneDNN rounds its result to bfloat16, which near 20 means steps of 0.125: enough to make ties of what is not tied. So a
    packed head is applied twice, the second time with the first result subtracted before rounding: the sum of both is as
    good as float32.
    """

    def __init__(self, weight: Tensor, tp: TensorParallel, product: Product | None = None) -> None:
        self._linear = Linear(weight, None, product)
        self._tp = tp

    @property
    def is_packed(self) -> bool:
        return self._linear.is_packed

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._precise(hidden)
        return logits if self._tp.size == 1 else self._tp.all_gather_last_dim(logits)

    def _precise(self, hidden: Tensor) -> Tensor:
        rough = self._linear(hidden)
        packed = self._linear._packed
        if packed is None:
            return rough.float()
        rest: Tensor = _mkldnn._linear_pointwise.binary(hidden, rough.neg(), packed, None, "add")
        return rough.float().add_(rest)


class VocabularyEmbedding:
    """Token ids [T] → float32 [T, H], the start of the residual stream. Each rank holds the rows of its slice of the vocabulary."""

    def __init__(self, weight: Tensor, tp: TensorParallel) -> None:
        self._weight = weight
        self._tp = tp
        self._first = tp.rank * weight.shape[0]

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self._tp.size == 1:
            return functional.embedding(token_ids, self._weight).float()
        local = token_ids - self._first
        elsewhere = (local < 0) | (local >= self._weight.shape[0])
        rows = functional.embedding(local.masked_fill(elsewhere, 0), self._weight).float()
        return self._tp.all_reduce(rows.masked_fill_(elsewhere[:, None], 0.0))


def pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's own layout, or None where it cannot be used."""
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
        return None
    if not torch._C._has_mkldnn or not _mkldnn._is_mkldnn_bf16_supported():
        return None
    try:
        packed: Tensor = _mkldnn._reorder_linear_weight(weight.contiguous())
        return packed
    except RuntimeError:  # a build of torch without the operator, or a shape it does not take
        return None
