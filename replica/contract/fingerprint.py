"""Short names of contents: two checkpoints with equal fingerprints are taken for the same model.

Weights are gigabytes, so they are not read whole: size, header and samples spread over the data decide. That tells apart
what happens by accident (another revision, another quantisation, a truncated copy), not what somebody forges.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

_DIGEST_BYTES = 8
_HEAD_BYTES = 64 * 1024
_SAMPLES = 32
_SAMPLE_BYTES = 4096


def of_whole_files(paths: Iterable[Path]) -> str:
    """16 hex digits over the names and whole contents of `paths`, in their order."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for path in paths:
        _part(digest, path.name.encode())
        _part(digest, path.read_bytes())
    return digest.hexdigest()


def of_file_start(path: Path, length: int) -> str:
    """16 hex digits over the first `length` bytes."""
    with path.open("rb") as file:
        return blake2b(file.read(length), digest_size=_DIGEST_BYTES).hexdigest()


def of_sampled_files(paths: Iterable[Path], *texts: str) -> str:
    """16 hex digits over `texts` and, per file in order, its size, its start and 32 samples of 4 KiB spread evenly."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for text in texts:
        _part(digest, text.encode())
    for path in paths:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            _part(digest, file.read(_HEAD_BYTES))
            for index in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                _part(digest, file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _part(digest: blake2b, data: bytes) -> None:
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)
