"""The header of a safetensors file: names, dtypes, shapes and byte ranges, checked against the file's size.

Layout: 8 bytes of length (little-endian), that many bytes of JSON, the data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

from replica.contract.model_error import ModelError

HEADER_BYTES_MAX = 100_000_000
_DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    data_offset: int  # bytes


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """Raises ModelError for a file that is missing, broken or shorter than its header promises."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(HEADER_BYTES_MAX, size - 8):
                raise ModelError(f"{path}: truncated or broken safetensors file (its header runs past the end of the file)")
            entries = json.loads(file.read(length))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: broken safetensors header (not JSON)") from error
    if not isinstance(entries, dict):
        raise ModelError(f"{path}: broken safetensors header (not an object)")
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        dtypes[name], shapes[name] = _checked(path, name, entry, size - 8 - length)
    return SafetensorsHeader(shapes, dtypes, 8 + length)


def _checked(path: Path, name: str, entry: object, data_bytes: int) -> tuple[str, tuple[int, ...]]:
    fields = entry if isinstance(entry, dict) else {}
    try:
        dtype, shape = str(fields["dtype"]), tuple(int(n) for n in fields["shape"])
        start, end = (int(n) for n in fields["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: broken safetensors header (entry {name[:80]!r})") from error
    if end > data_bytes:
        raise ModelError(f"{path}: truncated safetensors file: {name!r} ends at byte {end} of {data_bytes}")
    if dtype in _DTYPE_BYTES and end - start != prod(shape) * _DTYPE_BYTES[dtype]:
        raise ModelError(f"{path}: broken safetensors header ({name!r}: {end - start} bytes for {dtype} {list(shape)})")
    return dtype, shape
