"""Weights from safetensors files. Files are mapped; a rank touches only the bytes of its own part."""

from __future__ import annotations

from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.cpu.packed import Groups
from replica.contract.model_error import ModelError
from replica.contract.model_files import ModelFiles
from replica.contract.safetensors_header import read_safetensors_header
from replica.models.weight_source import WHOLE, Part

_DTYPES = ("F32", "F16", "BF16", "F64")


class SafetensorsSource:
    """All shards of one checkpoint."""

    def __init__(self, files: ModelFiles) -> None:
        self._name = str(files.directory)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._homes: dict[str, Any] = {}
        for path in files.weights:
            header = read_safetensors_header(path)
            try:
                handle = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: broken safetensors file ({error})") from error
            for name, shape in header.shapes.items():
                if header.dtypes[name] not in _DTYPES:
                    raise ModelError(f"{path}: {name} has data type {header.dtypes[name]}, which is not supported")
                self._shapes[name] = shape
                self._homes[name] = handle

    def has(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise ModelError(f"{self._name}: tensor {name} is missing")
        return self._shapes[name]

    def read(self, name: str, *, rows: Part = WHOLE, columns: Part = WHOLE) -> Tensor:
        shape = self.shape(name)
        part = self._homes[name].get_slice(name)
        tensor: Tensor = part[:, columns.of(shape[1])] if columns.count > 1 else part[rows.of(shape[0])]
        return tensor

    def kinds(self) -> dict[str, str]:
        return {}

    def groups(self, name: str, *, rows: Part = WHOLE, columns: Part = WHOLE, bits: int | None = None) -> Groups | None:
        return None

    def close(self) -> None:
        self._homes.clear()  # a file is unmapped with the last tensor that views it
