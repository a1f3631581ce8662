"""The key-value header of a GGUF file, without its tensors.

The router needs the vocabulary, the merges and the chat template only; walking the header takes 0.1 s where building
an object for every array element takes two.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

GgufValue = int | float | bool | str | list["GgufValue"]

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING_BYTES_MAX = 16 * 1024 * 1024
_COUNT_MAX = 16 * 1024 * 1024  # entries of an array, or keys


class GgufError(ValueError):
    """Not a GGUF file of version 2 or 3, or a broken one."""


def read_metadata(path: Path) -> dict[str, GgufValue]:
    """Every key of the header. Raises GgufError for a broken header, OSError for a file that cannot be read."""
    with path.open("rb") as file:
        try:
            return _read_header(file)
        except (struct.error, UnicodeDecodeError, RecursionError) as error:
            raise GgufError(f"{path}: the GGUF header is broken or cut short") from error


def _read_header(file: BinaryIO) -> dict[str, GgufValue]:
    if file.read(4) != _MAGIC:
        raise GgufError(f"{file.name}: not a GGUF file")
    version, _tensors, keys = struct.unpack("<IQQ", file.read(20))
    if version not in (2, 3):
        raise GgufError(f"{file.name}: GGUF version {version} is not supported (2 and 3 are)")
    metadata: dict[str, GgufValue] = {}
    for _ in range(_bounded(keys, _COUNT_MAX)):
        key = _read_string(file)
        (kind,) = struct.unpack("<I", file.read(4))
        metadata[key] = _read_value(file, kind)
    return metadata


def _read_value(file: BinaryIO, kind: int) -> GgufValue:
    if kind == _STRING:
        return _read_string(file)
    if kind == _ARRAY:
        return _read_array(file)
    if kind not in _SCALARS:
        raise GgufError(f"{file.name}: unknown GGUF value type {kind}")
    layout = "<" + _SCALARS[kind]
    value: int | float | bool = struct.unpack(layout, file.read(struct.calcsize(layout)))[0]
    return value


def _read_array(file: BinaryIO) -> list[GgufValue]:
    kind, count = struct.unpack("<IQ", file.read(12))
    _bounded(count, _COUNT_MAX)
    if kind in _SCALARS:
        layout = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack(layout, file.read(struct.calcsize(layout))))
    return [_read_value(file, kind) for _ in range(count)]


def _read_string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    data = file.read(_bounded(length, _STRING_BYTES_MAX))
    if len(data) != length:
        raise GgufError(f"{file.name}: the GGUF header is cut short")
    return data.decode()


def _bounded(count: int, limit: int) -> int:
    if count > limit:
        raise GgufError(f"the GGUF header names a size of {count}, above {limit}")
    return count
