"""A decoder in C++: token ids of a mixed batch to hidden states and logits, one call a step, over the paged cache."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch import CacheLayout, Int32, PagedBatch
from kernels.cpu.abi import DRAW, FAULTS, LayerC, MatrixC, ModelC, StepC
from kernels.cpu.packed import PackedMatrix
from kernels.cpu.pages import pool_shape


class StepFault(ValueError):
    """A step that the kernel refuses to compute; nothing was written."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    attention_norm: Tensor  # [H] float32, as all vectors here
    qkv: PackedMatrix  # (queries | keys | values)
    out: PackedMatrix
    feed_forward_norm: Tensor
    gate_up: PackedMatrix  # rows by turns, see packed.by_turns
    down: PackedMatrix
    query_norm: Tensor | None = None  # [D], of each head before it is rotated
    key_norm: Tensor | None = None
    window: int = 0  # tokens that a query looks back, itself included; 0: all


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """All that the step reads. `head` may be `embedding`."""

    heads: int
    layers: tuple[DecoderLayer, ...]
    embedding: PackedMatrix
    norm: Tensor
    head: PackedMatrix
    epsilon: float
    attention_scale: float
    cosine: Tensor  # [positions, D / 2] float32
    sine: Tensor

    @property
    def multiplied(self) -> tuple[PackedMatrix, ...]:
        """Every matrix that a step multiplies by."""
        return (*(one for each in self.layers for one in (each.qkv, each.out, each.gate_up, each.down)), self.head)

    @property
    def nbytes(self) -> int:
        """That a step reads of weights, at least."""
        return sum(one.nbytes for one in self.multiplied)

    @property
    def parameters(self) -> int:
        """Multiplications for one token."""
        return sum(one.rows * one.columns for one in self.multiplied)


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step brought. Float32."""

    hidden: Tensor  # [T, H] states after the last layer
    logits: Tensor  # [W, V]
    best: npt.NDArray[np.int64]  # [W] the token of the largest logit, of equals the first
    best_logits: npt.NDArray[np.float32]  # [W] its logit; NaN where the row is not finite


class Decoder:
    """Holds what it computes with alive. One caller at a time.

    Bit for bit the same logits for a token alone, in any batch, in chunks of any size, and after its row was computed again.
    """

    def __init__(self, library: ctypes.CDLL, model: DecoderModel, layout: CacheLayout, pool: Tensor, threads: int) -> None:
        """pool: bfloat16 or int8, of pages.pool_shape, contiguous."""
        assert pool.is_contiguous() and pool.dtype in (torch.bfloat16, torch.int8)
        assert pool.shape == pool_shape(len(model.layers), pool.shape[1], layout, pool.dtype)
        self._library = library
        self.model = model
        self._pool = pool
        self.hidden_size = model.embedding.columns
        self.vocab_size = model.head.rows
        table = (LayerC * len(model.layers))(*(_layer(each) for each in model.layers))
        width = model.layers[0].down.columns
        self._c_model = ModelC(
            *(len(model.layers), self.hidden_size, model.heads, layout.kv_heads, layout.head_dim, width, model.embedding.rows),
            *(layout.block_size, model.cosine.shape[0], threads, model.epsilon, model.attention_scale, pool.shape[1]),
            *(pool.dtype is torch.int8, pool.data_ptr(), _address(model.cosine), _address(model.sine), table),
            *(_matrix(model.embedding), _matrix(model.head), _address(model.norm)),
        )
        self._handle: int | None = library.rantang_open(ctypes.byref(self._c_model))
        if not self._handle:
            raise MemoryError("no memory or no threads for the C++ step")

    def step(self, token_ids: npt.NDArray[np.int64], batch: PagedBatch, wanted: Int32) -> Computed:
        """Writes keys and values of all tokens; logits are those of the tokens at `wanted` places of the packed batch. Raises StepFault."""
        ids = np.ascontiguousarray(token_ids, np.int64)
        starts, counts, tables = (np.ascontiguousarray(each, np.int32) for each in (batch.starts, batch.counts, batch.tables))
        wanted = np.ascontiguousarray(wanted, np.int32)
        hidden = torch.empty(ids.size, self.hidden_size)
        logits = torch.empty(wanted.size, self.vocab_size)
        best, best_logits = np.empty(wanted.size, np.int64), np.empty(wanted.size, np.float32)
        pointers = (each.ctypes.data for each in (ids, starts, counts, tables, wanted))
        outputs = (hidden.data_ptr(), logits.data_ptr(), best.ctypes.data, best_logits.ctypes.data)
        step = StepC(ids.size, starts.size, tables.shape[1], wanted.size, *pointers, *outputs)
        self._check(self._library.rantang_step(self._handle, ctypes.byref(step)))
        return Computed(hidden, logits, best, best_logits)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, H] float32 → logits [n, V]."""
        states = hidden.contiguous()
        out = torch.empty(states.shape[0], self.vocab_size)
        self._check(self._library.rantang_logits(self._handle, states.data_ptr(), states.shape[0], out.data_ptr()))
        return out

    def draw(self, logits: npt.NDArray[np.float32], draws: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
        """A token for each of `draws` (of dtype abi.DRAW) from logits [R, V], contiguous. What they ask: sampling.h. Raises StepFault."""
        assert logits.flags.c_contiguous and logits.dtype == np.float32 and logits.shape[1] == self.vocab_size and draws.dtype == DRAW
        tokens = np.empty(draws.size, np.int64)
        sizes = (draws.size, logits.ctypes.data, logits.shape[0])
        self._check(self._library.rantang_draw(self._handle, draws.ctypes.data, *sizes, tokens.ctypes.data))
        return tokens

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        handle, self._handle = self._handle, None
        if handle:
            self._library.rantang_close(handle)

    def _check(self, fault: int) -> None:
        if fault:
            raise StepFault(FAULTS.get(fault, f"fault {fault}"))

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


def _layer(layer: DecoderLayer) -> LayerC:
    return LayerC(
        *(_address(each) for each in (layer.attention_norm, layer.query_norm, layer.key_norm, layer.feed_forward_norm)),
        *(_matrix(each) for each in (layer.qkv, layer.out, layer.gate_up, layer.down)),
        layer.window,
    )


def _matrix(matrix: PackedMatrix) -> MatrixC:
    sizes = (matrix.kind, matrix.rows, matrix.columns, 0)
    return MatrixC(*sizes, matrix.weights.data_ptr(), _address(matrix.scales, torch.float16), _address(matrix.bias))


def _address(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous() and tensor.dtype is dtype
    return tensor.data_ptr()
