"""Weights from a GGUF file: mapped, a rank's part dequantised tensor by tensor, under the names of a Hugging Face checkpoint.

Quantised weights are rounded to bfloat16 when they are dequantised, whatever they are served in: so float32 serves the very
model that bfloat16 does, and is its reference.
"""

from __future__ import annotations

import re

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize
from torch import Tensor

from replica.contract.gguf_header import BLOCKS, GgufTensor, read_gguf_header
from replica.contract.model_error import ModelError
from replica.contract.model_files import ModelFiles
from replica.models.weight_source import WHOLE, Part

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


class GgufSource:
    """One GGUF file. `head_dim` tells how its query and key rows are permuted."""

    def __init__(self, files: ModelFiles, head_dim: int) -> None:
        self._path = files.gguf
        self._tensors = {tensor.name: tensor for tensor in read_gguf_header(files.gguf).tensors}
        self._data: npt.NDArray[np.uint8] = np.memmap(files.gguf, mode="r", dtype=np.uint8)
        self._head_dim = head_dim

    def has(self, name: str) -> bool:
        return gguf_name(name) in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(reversed(self._tensor(name).shape))

    def read(self, name: str, *, rows: Part = WHOLE, columns: Part = WHOLE) -> Tensor:
        tensor, shape = self._tensor(name), self.shape(name)
        elements, block_bytes, kind = BLOCKS[tensor.kind]
        if shape[-1] % elements:
            raise ModelError(f"{self._path}: {tensor.name} has rows of {shape[-1]}, not whole {kind} blocks of {elements}")
        blocks = shape[-1] // elements
        raw = self._data[tensor.offset : tensor.offset + tensor.size_bytes].reshape(-1, blocks, block_bytes)
        if len(shape) == 1:
            return _restored(name, _values(raw, tensor.kind)[0], self._head_dim)[rows.of(shape[0])]
        wanted = columns.of(shape[1])  # may cut a block: read whole ones, then trim
        first = wanted.start // elements
        raw = raw[rows.of(shape[0]), first : -(-wanted.stop // elements)]
        trimmed = _values(raw, tensor.kind)[:, wanted.start - first * elements : wanted.stop - first * elements]
        return _restored(name, trimmed, self._head_dim)

    def close(self) -> None:
        self._data = np.empty(0, dtype=np.uint8)  # unmapped with the last tensor that views it

    def _tensor(self, name: str) -> GgufTensor:
        found = self._tensors.get(gguf_name(name))
        if found is None:
            raise ModelError(f"{self._path}: tensor {gguf_name(name)} is missing")
        return found


def gguf_name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight → blk.3.attn_q.weight."""
    match = _LAYER.fullmatch(name)
    if match is not None:
        layer, inside, kind = match.groups()
        return f"blk.{layer}.{INSIDE.get(inside, inside)}.{kind}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOP.get(stem, stem)}.{kind}"


def _values(raw: npt.NDArray[np.uint8], kind: int) -> Tensor:
    """[rows, blocks, block bytes] → [rows, elements]."""
    flat = np.array(raw).reshape(raw.shape[0], -1)  # a copy: the map is read-only
    name = BLOCKS[kind][2]
    if name == "F32":
        return torch.from_numpy(flat.view(np.float32))
    if name == "F16":
        return torch.from_numpy(flat.view(np.float16))
    if name == "BF16":
        return torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(dequantize(flat, gguf.GGMLQuantizationType(kind))).bfloat16()


def _restored(name: str, values: Tensor, head_dim: int) -> Tensor:
    """A GGUF keeps the rows of a query or key head as pairs (0, D/2, 1, D/2 + 1, …); put them back into halves."""
    if name.split(".")[-2] not in ("q_proj", "k_proj"):
        return values
    return values.reshape(-1, head_dim // 2, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
