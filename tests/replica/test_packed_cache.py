"""Packed weights on disk: found again and never anything else, and a cache that cannot be written is said and served without."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from kernels.cpu.packed import PackedMatrix, pack_bf16, pack_groups, quantise_q4, quantise_q8
from replica.contract.model_files import resolve
from replica.models import packed_cache
from replica.models.packed_cache import ALIGNMENT, PackedCache, cache_path
from tests.kernels.plain_decoder import library_or_reason
from tests.replica.test_cpu_runner import FITTING, logits_of, runner_of
from tests.replica.tiny_gguf import write_llama_gguf
from tests.replica.tiny_llama import write_tiny_llama

needs_step = pytest.mark.skipif(library_or_reason()[0] is None, reason="no C++ step here")


@pytest.fixture(autouse=True)
def small_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 1)


def made() -> dict[str, PackedMatrix]:
    values = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    return {
        "bf16": pack_bf16(values, torch.arange(48.0)),
        "q8": pack_groups(quantise_q8(values)),
        "q4": pack_groups(quantise_q4(values), torch.ones(48)),
    }


def never(*_: object) -> PackedMatrix:
    raise AssertionError("packed again")


def filled(path: Path) -> dict[str, PackedMatrix]:
    cache, matrices = PackedCache(path), made()
    for name, matrix in matrices.items():
        cache.get(name, lambda matrix=matrix: matrix)  # type: ignore[misc]
    assert cache.keep() == ""
    return matrices


def test_what_was_packed_is_found_again_at_cache_lines(tmp_path: Path) -> None:
    matrices = filled(tmp_path / "weights" / "a.safetensors")
    again = PackedCache(tmp_path / "weights" / "a.safetensors")
    for name, meant in matrices.items():
        found = again.get(name, never)
        assert (found.kind, found.rows, found.columns) == (meant.kind, meant.rows, meant.columns)
        for one, other in ((found.weights, meant.weights), (found.scales, meant.scales), (found.bias, meant.bias)):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.data_ptr() % ALIGNMENT == 0 and one.dtype == other.dtype and torch.equal(one, other)
    with pytest.raises(AssertionError, match="packed again"):
        again.get("another", never)
    assert again.keep() == "" and [path.name for path in (tmp_path / "weights").iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"\xff" * 64 + data[64:]])
def test_a_damaged_file_is_packed_again(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "a.safetensors"
    matrices = filled(path)
    path.write_bytes(damage(path.read_bytes()))
    cache = PackedCache(path)
    assert cache.get("q8", lambda: matrices["q8"]) is matrices["q8"]
    assert cache.keep() == ""
    assert torch.equal(PackedCache(path).get("q8", never).weights, matrices["q8"].weights)


def test_a_few_files_are_kept_those_used_last(tmp_path: Path) -> None:
    for number in range(packed_cache.KEPT_FILES + 2):
        filled(tmp_path / f"{number}.safetensors")
        os.utime(tmp_path / f"{number}.safetensors", (number, number))
    PackedCache(tmp_path / "2.safetensors")  # used
    filled(tmp_path / "new.safetensors")
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["2", "4", "5", "new"]


def test_other_weights_another_file(tmp_path: Path) -> None:
    files = resolve(str(write_tiny_llama(tmp_path / "model", **FITTING)))
    first = cache_path(tmp_path, files, "w8a8")
    assert cache_path(tmp_path, files, "w8a8") == first != cache_path(tmp_path, files, "w4a8")
    os.utime(files.weights[0], (1, 1))
    assert cache_path(tmp_path, files, "w8a8") != first


@needs_step
def test_a_second_start_reads_the_cache_and_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model.gguf"
    write_llama_gguf(source, gguf.GGMLQuantizationType["Q4_1"], odd={"embed_tokens": gguf.GGMLQuantizationType["Q8_0"]}, **FITTING)
    monkeypatch.setattr(packed_cache, "cache_directory", lambda: tmp_path / "cache" / "kernels")
    for form in (None, "w4a8", "w8a8"):
        first = logits_of(runner_of(source, quantization=form))
        with monkeypatch.context() as patch:
            patch.setattr("replica.models.loader_cpu.pack_groups", never)
            patch.setattr("replica.models.loader_cpu.pack_bf16", never)
            assert torch.equal(logits_of(runner_of(source, quantization=form)), first), form
    assert len(list((tmp_path / "cache" / "weights").iterdir())) == 3


@needs_step
def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_llama(tmp_path / "model", **FITTING)
    monkeypatch.setattr(packed_cache, "cache_directory", lambda: tmp_path / "cache" / "kernels")

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(packed_cache.tempfile, "TemporaryDirectory", read_only)
        runner = runner_of(model, quantization="w8a8")
    assert runner.kernels.endswith("cannot be written: Read-only file system") and "\n" not in runner.kernels
    assert logits_of(runner).isfinite().all()
    assert "cannot" not in runner_of(model, quantization="w8a8").kernels
