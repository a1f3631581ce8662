"""The header of a GGUF file: metadata and where each tensor lies. Reads no tensor data and needs no library.

Layout (little-endian): magic, version, tensor count, metadata count; the metadata; the tensors' descriptions; padding to
`general.alignment`; the data. Strings carry a 64-bit length.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from replica.contract.model_error import ModelError

MetadataValue = int | float | bool | str | list["MetadataValue"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# ggml's number of a data type: (elements of a block, bytes of a block, name). Only what can be dequantised exactly as ggml does.
BLOCKS = {
    0: (1, 4, "F32"),
    1: (1, 2, "F16"),
    2: (32, 18, "Q4_0"),
    3: (32, 20, "Q4_1"),
    6: (32, 22, "Q5_0"),
    7: (32, 24, "Q5_1"),
    8: (32, 34, "Q8_0"),
    10: (256, 84, "Q2_K"),
    11: (256, 110, "Q3_K"),
    12: (256, 144, "Q4_K"),
    13: (256, 176, "Q5_K"),
    14: (256, 210, "Q6_K"),
    30: (1, 2, "BF16"),
}
_NESTING_MAX = 4
_DIMENSIONS_MAX = 4
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` is the file's: the fastest dimension first. `offset`: bytes from the file's start. `kind`: ggml's number of the data type."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def size_bytes(self) -> int:
        """Bytes of data. Raises KeyError for a data type that is not in BLOCKS."""
        elements, size, _ = BLOCKS[self.kind]
        return prod(self.shape) // elements * size


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: dict[str, MetadataValue]
    tensors: tuple[GgufTensor, ...]
    metadata_end: int  # bytes; the metadata is file[:metadata_end]
    data_offset: int  # bytes; the first tensor's data begins here

    def text(self, key: str, default: str = "") -> str:
        """The string at `key`, or `default` where there is none."""
        value = self.metadata.get(key, default)
        return value if isinstance(value, str) else default

    def number(self, key: str) -> float | None:
        """The number at `key`; None where there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def integer(self, key: str) -> int | None:
        value = self.number(key)
        return None if value is None else int(value)


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises ModelError for anything that is not a whole GGUF header; never reads beyond the file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data, path).header()
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"{path}: cannot be read: {error}") from error


class _Cursor:
    """Reads forward through the mapped file; every length is checked against what is left."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def header(self) -> GgufHeader:
        if self._take(4) != _MAGIC:
            raise ModelError(f"{self._path}: not a GGUF file")
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise ModelError(f"{self._path}: GGUF version {version} is not supported (only {' and '.join(map(str, _VERSIONS))})")
        tensor_count, metadata_count = int(self._scalar("<Q")), int(self._scalar("<Q"))
        metadata: dict[str, MetadataValue] = {}
        for _ in range(self._bounded(metadata_count, 13)):
            key = self._string()
            metadata[key] = self._value(int(self._scalar("<I")), 0)
        metadata_end = self._at
        tensors = [self._tensor() for _ in range(self._bounded(tensor_count, 24))]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self._path}: broken GGUF header: alignment {alignment!r}")
        data_offset = -(-self._at // alignment) * alignment
        moved = tuple(GgufTensor(t.name, t.shape, t.kind, t.offset + data_offset) for t in tensors)
        return GgufHeader(metadata, moved, metadata_end, data_offset)

    def _tensor(self) -> GgufTensor:
        name = self._string()
        dimensions = int(self._scalar("<I"))
        if dimensions > _DIMENSIONS_MAX:
            raise ModelError(f"{self._path}: broken GGUF header: tensor {name[:64]!r} with {dimensions} dimensions")
        shape = tuple(int(self._scalar("<Q")) for _ in range(dimensions))
        kind, offset = int(self._scalar("<I")), int(self._scalar("<Q"))
        return GgufTensor(name, shape, kind, offset)

    def _value(self, kind: int, depth: int) -> MetadataValue:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise ModelError(f"{self._path}: broken GGUF header: metadata type {kind}")
            return self._scalar(_SCALARS[kind])
        element, count = int(self._scalar("<I")), int(self._scalar("<Q"))
        if element in _SCALARS:
            form = _SCALARS[element]
            raw = self._take(count * struct.calcsize(form))
            return [value for (value,) in struct.iter_unpack(form, raw)]
        if element == _STRING:
            return list(self._strings(self._bounded(count, _LENGTH.size)))
        if depth >= _NESTING_MAX:
            raise ModelError(f"{self._path}: broken GGUF header: arrays nested more than {_NESTING_MAX} deep")
        return [self._value(element, depth + 1) for _ in range(self._bounded(count, 8))]

    def _string(self) -> str:
        raw = self._take(int(self._scalar("<Q")))
        return raw.decode("utf-8", errors="surrogateescape")

    def _strings(self, count: int) -> Iterator[str]:
        """A vocabulary has a hundred thousand of them, and every rank of a replica reads them before anything else."""
        data, at, end = self._data, self._at, len(self._data)
        for _ in range(count):
            begin = at + _LENGTH.size
            if begin > end:
                raise self._truncated()
            at = begin + _LENGTH.unpack_from(data, at)[0]
            if at > end:
                raise self._truncated()
            yield data[begin:at].decode("utf-8", errors="surrogateescape")
        self._at = at

    def _scalar(self, form: str) -> int | float | bool:
        size = struct.calcsize(form)
        if self._at + size > len(self._data):
            raise self._truncated()
        value: int | float | bool = struct.unpack_from(form, self._data, self._at)[0]
        self._at += size
        return value

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise self._truncated()
        start = self._at
        self._at += size
        return self._data[start : self._at]

    def _bounded(self, count: int, bytes_each: int) -> int:
        """`count`, if that many things of at least `bytes_each` bytes can still follow."""
        if count * bytes_each > len(self._data) - self._at:
            raise self._truncated()
        return count

    def _truncated(self) -> ModelError:
        return ModelError(f"{self._path}: truncated or broken GGUF file (its header runs past the end of the file)")
