"""Weights from a GGUF file: mapped, a rank's part dequantised tensor by tensor, under the names of a Hugging Face checkpoint.

Quantised weights are rounded to bfloat16 when they are dequantised, whatever they are served in: so float32 serves the very
model that bfloat16 does, and is its reference.
"""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize
from torch import Tensor

from kernels.cpu.packed import GROUP, Groups
from replica.contract.architectures import architecture_named
from replica.contract.gguf_header import BLOCKS, GgufTensor, read_gguf_header
from replica.contract.model_error import ModelError
from replica.contract.model_files import ModelFiles
from replica.models.gguf_groups import BITS, groups_of
from replica.models.gguf_names import gguf_name
from replica.models.model_config import ModelConfig
from replica.models.weight_source import WHOLE, Part


class GgufSource:
    """One GGUF file. Some architectures keep the rows of a query or key head in another order there."""

    def __init__(self, files: ModelFiles, config: ModelConfig) -> None:
        self._path = files.gguf
        self._tensors = {tensor.name: tensor for tensor in read_gguf_header(files.gguf).tensors}
        self._data: npt.NDArray[np.uint8] = np.memmap(files.gguf, mode="r", dtype=np.uint8)
        architecture = architecture_named(config.architecture)
        self._pairs_of = config.head_dim // 2 if architecture is not None and architecture.gguf_interleaves else None

    def has(self, name: str) -> bool:
        return gguf_name(name) in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(reversed(self._tensor(name).shape))

    def read(self, name: str, *, rows: Part = WHOLE, columns: Part = WHOLE) -> Tensor:
        tensor, shape = self._tensor(name), self.shape(name)
        raw, elements = self._blocks(tensor), BLOCKS[tensor.kind][0]
        if len(shape) == 1:
            return self._restored(name, _values(raw, tensor.kind)[0])[rows.of(shape[0])]
        wanted = columns.of(shape[1])  # may cut a block: read whole ones, then trim
        first = wanted.start // elements
        raw = raw[rows.of(shape[0]), first : -(-wanted.stop // elements)]
        trimmed = _values(raw, tensor.kind)[:, wanted.start - first * elements : wanted.stop - first * elements]
        return self._restored(name, trimmed)

    def kinds(self) -> dict[str, str]:
        return {name: BLOCKS[tensor.kind][2] for name, tensor in self._tensors.items()}

    def groups(self, name: str, *, rows: Part = WHOLE, columns: Part = WHOLE, bits: int | None = None) -> Groups | None:
        tensor, shape = self._tensor(name), self.shape(name)
        elements, _, kind = BLOCKS[tensor.kind]
        if kind not in BITS or bits not in (None, BITS[kind]):
            return None
        raw, each = self._blocks(tensor), elements // GROUP
        wanted = columns.of(shape[1] // GROUP)
        first = wanted.start // each  # a part may cut a block: whole ones are decoded, then trimmed
        found = groups_of(raw[rows.of(shape[0]), first : -(-wanted.stop // each)], kind)
        if found is None:
            return None
        kept = slice(wanted.start - first * each, wanted.stop - first * each)
        m = None if found.m is None else self._restored(name, found.m[:, kept])
        return Groups(self._restored(name, found.q[:, kept]), self._restored(name, found.d[:, kept]), m)

    def close(self) -> None:
        self._data = np.empty(0, dtype=np.uint8)  # unmapped with the last tensor that views it

    def _blocks(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """[rows, blocks, block bytes], a view of the file. Raises ModelError for a row of broken blocks."""
        elements, block_bytes, kind = BLOCKS[tensor.kind]
        width = tensor.shape[0]
        if width % elements:
            raise ModelError(f"{self._path}: {tensor.name} has rows of {width}, not whole {kind} blocks of {elements}")
        return self._data[tensor.offset : tensor.offset + tensor.size_bytes].reshape(-1, width // elements, block_bytes)

    def _restored(self, name: str, values: Tensor) -> Tensor:
        """Rows kept as pairs (0, D/2, 1, D/2 + 1, …) are put back into halves."""
        if self._pairs_of is None or name.split(".")[-2] not in ("q_proj", "k_proj"):
            return values
        return values.reshape(-1, self._pairs_of, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)

    def _tensor(self, name: str) -> GgufTensor:
        found = self._tensors.get(gguf_name(name))
        if found is None:
            raise ModelError(f"{self._path}: tensor {gguf_name(name)} is missing")
        return found


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
