"""Matrices as the C++ step reads them, kept in the user's cache: packed once for a model and a form, then mapped by all replicas."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.cpu import packed
from kernels.cpu.build import cache_directory
from kernels.cpu.packed import Kind, PackedMatrix
from replica.contract.model_files import ModelFiles

KEPT_FILES = 4  # of the cache, those used last
LEAST_BYTES = 16 << 20  # less is packed sooner than it is looked up
ALIGNMENT = 64  # bytes: no load of the step crosses a cache line
_DTYPES = {torch.uint8: "U8", torch.float16: "F16", torch.float32: "F32", torch.bfloat16: "BF16"}
_HERE = Path(__file__)
_SOURCES = (Path(packed.__file__), _HERE, _HERE.with_name("gguf_groups.py"), _HERE.with_name("loader_cpu.py"))  # say what a matrix becomes


def packed_cache(files: ModelFiles, quantization: str | None) -> PackedCache | None:
    """None for a checkpoint that is served as it is: its matrices are only laid out anew, which costs no more than reading."""
    if quantization is None and files.kind != "gguf":
        return None
    return PackedCache(cache_path(cache_directory().parent / "weights", files, quantization or "bfloat16"))


def cache_path(directory: Path, files: ModelFiles, form: str) -> Path:
    """One file for these very weights, this form and the sources that pack them."""
    digest = hashlib.sha256(f"{files.fingerprint} {form}".encode())
    for weights in files.weights:
        found = weights.stat()
        digest.update(f"{weights.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    for source in _SOURCES:
        digest.update(source.read_bytes())
    return directory / f"{form}-{digest.hexdigest()[:20]}.safetensors"


class PackedCache:
    """The file at `path`, if it is there and whole, and what it lacks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = _read(path)
        self._made: dict[str, PackedMatrix] = {}

    def get(self, name: str, make: Callable[[], PackedMatrix]) -> PackedMatrix:
        """The matrix `name`, packed by `make` if the file has none."""
        found = self._found.get(name)
        if found is None:
            found = self._made[name] = make()
        return found

    def keep(self) -> str:
        """Writes what had to be packed; why it could not, one line, or ''. A file written by half never has the name."""
        if not self._made or sum(matrix.nbytes for matrix in self._made.values()) < LEAST_BYTES:
            return ""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._path.parent) as scratch:
                made = Path(scratch) / self._path.name
                _write(made, {**self._found, **self._made})
                os.replace(made, self._path)
            _evict(self._path.parent)
        except OSError as error:
            return f"packed at every start, for the cache {self._path.parent} cannot be written: {error.strerror or error}"
        return ""


def _read(path: Path) -> dict[str, PackedMatrix]:
    """Views of the mapped file. Nothing where there is none, or no whole one."""
    try:
        with safe_open(path, framework="pt") as file:
            sizes = {name: [int(part) for part in text.split()] for name, text in (file.metadata() or {}).items()}
            stored = set(file.keys())

            def part(name: str, what: str) -> Tensor | None:
                return file.get_tensor(f"{name}/{what}") if f"{name}/{what}" in stored else None

            found = {
                name: PackedMatrix(Kind(kind), rows, columns, file.get_tensor(f"{name}/weights"), part(name, "scales"), part(name, "bias"))
                for name, (kind, rows, columns) in sizes.items()
            }
        os.utime(path)
    except (SafetensorError, OSError, ValueError):
        return {}
    return found


def _write(path: Path, matrices: Mapping[str, PackedMatrix]) -> None:
    """A safetensors file whose tensors begin at cache lines: every part of a packed matrix is whole lines, so the header has to be too."""
    header: dict[str, object] = {"__metadata__": {name: f"{int(one.kind)} {one.rows} {one.columns}" for name, one in matrices.items()}}
    parts: list[Tensor] = []
    offset = 0
    for name, one in matrices.items():
        for what, tensor in (("weights", one.weights), ("scales", one.scales), ("bias", one.bias)):
            if tensor is None:
                continue
            assert tensor.is_contiguous() and tensor.nbytes % ALIGNMENT == 0
            place = [offset, offset + tensor.nbytes]
            header[f"{name}/{what}"] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
            parts.append(tensor)
            offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in parts:
            tensor.flatten().view(torch.uint8).numpy().tofile(file)


def _evict(directory: Path) -> None:
    """A mapped file stays readable for whoever has it."""
    by_use = sorted(directory.glob("*.safetensors"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in by_use[KEPT_FILES:]:
        path.unlink(missing_ok=True)
