"""Matrices as the C++ step reads them, kept in the user's cache: packed once for a model and a form, then mapped by all replicas."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.cpu import packed
from kernels.cpu.build import cache_directory
from kernels.cpu.lock import lock_file
from kernels.cpu.packed import Form, Kind, PackedMatrix, is_whole
from replica.contract import architectures, gguf_header, safetensors_header
from replica.contract.model_files import ModelFiles

KEPT_FILES = 4  # of the cache, those used last
LEAST_BYTES = 16 << 20  # less is packed sooner than it is looked up
ALIGNMENT = 64  # bytes: no load of the step crosses a cache line
_DTYPES = {torch.uint8: "U8", torch.float16: "F16", torch.float32: "F32", torch.bfloat16: "BF16"}
LOCK_WAIT_S = 180.0  # for another process that packs; then this one packs for itself
SCRATCH = "packing-"
# What says what a matrix becomes. All of this package: to pack once more after a change is cheaper than to serve what it left behind.
_CONTRACT = (architectures.__file__, gguf_header.__file__, safetensors_header.__file__)
_SOURCES = (*map(Path, (packed.__file__, *_CONTRACT)), *sorted(Path(__file__).parent.glob("*.py")))
_DEQUANTISES = "gguf"  # this package, some of its kinds


def packed_cache(files: ModelFiles, quantization: str | None) -> PackedCache | None:
    """None for a checkpoint that is served as it is: its matrices are only laid out anew, which costs no more than reading."""
    if quantization is None and files.kind != "gguf":
        return None
    return PackedCache(cache_path(cache_directory().parent / "weights", files, quantization or "bfloat16"))


def cache_path(directory: Path, files: ModelFiles, form: str) -> Path:
    """One file for these very weights, this form and the code that packs them.

    The fingerprint is of samples, and who writes a file may set its size and time of modification, but not its time of change.
    """
    digest = hashlib.sha256(f"{files.fingerprint} {form} {importlib.metadata.version(_DEQUANTISES)}".encode())
    for weights in files.weights:
        found = weights.stat()
        digest.update(f"{weights.name} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}\n".encode())
    for source in _SOURCES:
        digest.update(source.read_bytes())
    return directory / f"{form}-{digest.hexdigest()[:20]}.safetensors"


class PackedCache:
    """The file at `path`, if it is there and whole, and what it lacks. Of processes that lack something one packs, the others wait."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._refusal = _distrusted(path.parent)  # why nothing is kept
        self._found = {} if self._refusal else _read(path)
        self._made: dict[str, PackedMatrix] = {}
        self._lock: IO[str] | None = None

    def get(self, name: str, form: Form, make: Callable[[], PackedMatrix]) -> PackedMatrix:
        """The matrix `name`, packed by `make` if the file has none of this form."""
        found = self._fitting(name, form)
        if found is None and self._lock is None and not self._refusal:
            self._refusal = self._take_lock()
            found = self._fitting(name, form)
        if found is None:
            found = self._made[name] = make()
        return found

    def keep(self) -> str:
        """Writes what had to be packed; why it could not, one line, or ''. A file written by half never has the name."""
        try:
            if not self._made or sum(matrix.nbytes for matrix in self._made.values()) < LEAST_BYTES:
                return ""
            if self._refusal:
                return self._refusal
            with tempfile.TemporaryDirectory(dir=self._path.parent, prefix=SCRATCH) as scratch:
                made = Path(scratch) / self._path.name
                _write(made, {**self._found, **self._made})
                os.replace(made, self._path)
            _evict(self._path.parent)
        except OSError as error:
            return _unwritable(self._path.parent, error)
        finally:
            self.close()
        return ""

    def close(self) -> None:
        """Lets others pack. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def _fitting(self, name: str, form: Form) -> PackedMatrix | None:
        found = self._found.get(name)
        return found if found is not None and form.fits(found) else None

    def _take_lock(self) -> str:
        """Reads again what another process may have kept until then. Why nothing can be kept, or ''."""
        directory = self._path.parent
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            refusal = _distrusted(directory)
            if refusal:
                return refusal
            self._lock = lock_file(directory / ".lock", LOCK_WAIT_S)
        except TimeoutError as error:
            return f"packed in memory, for {error}"
        except OSError as error:
            return _unwritable(directory, error)
        for left_over in directory.glob(f"{SCRATCH}*"):  # its writer was killed: it would hold the lock
            shutil.rmtree(left_over, ignore_errors=True)
        self._found = _read(self._path)
        return ""


def _distrusted(directory: Path) -> str:
    """Why others could have written there, one line; '' where only this user can (and root, who can anywhere), or nothing is there."""
    try:
        found = directory.stat()
    except OSError:
        return ""
    if found.st_uid not in (0, os.geteuid()):
        return f"packed at every start, for the cache {directory} belongs to another user"
    if found.st_mode & 0o022:
        return f"packed at every start, for the cache {directory} can be written by others (chmod go-w)"
    return ""


def _unwritable(directory: Path, error: OSError) -> str:
    return f"packed at every start, for the cache {directory} cannot be written: {error.strerror or error}"


def _read(path: Path) -> dict[str, PackedMatrix]:
    """Views of the mapped file: of matrices that are whole, and nothing where there is no file or a broken one."""
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
    except (SafetensorError, OSError, ValueError):
        return {}
    with contextlib.suppress(OSError):  # one that cannot be marked as used is as good
        os.utime(path)
    return {name: matrix for name, matrix in found.items() if is_whole(matrix)}


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
