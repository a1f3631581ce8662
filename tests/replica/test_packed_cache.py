"""Packed weights on disk: found again and never anything else, and a cache that cannot be written is said and served without."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from kernels.cpu.lock import lock_file
from kernels.cpu.packed import Form, Kind, PackedMatrix, pack_bf16, pack_groups, quantise_q4, quantise_q8
from replica.contract.model_error import ModelError
from replica.contract.model_files import resolve
from replica.models import packed_cache
from replica.models.packed_cache import ALIGNMENT, SCRATCH, PackedCache, cache_path
from tests.kernels.plain_decoder import library_or_reason
from tests.replica.test_cpu_runner import FITTING, logits_of, runner_of
from tests.replica.tiny_gguf import write_llama_gguf
from tests.replica.tiny_llama import write_tiny_llama

ISA, REASON = library_or_reason()
needs_step = pytest.mark.skipif(ISA is None, reason=f"no C++ step here: {REASON}")

PARTS = ("weights", "scales", "bias")


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


def form_of(matrix: PackedMatrix) -> Form:
    return Form((matrix.kind,), matrix.rows, matrix.columns, matrix.bias is not None)


def filled(path: Path) -> dict[str, PackedMatrix]:
    cache, matrices = PackedCache(path), made()
    for name, matrix in matrices.items():
        cache.get(name, form_of(matrix), lambda matrix=matrix: matrix)  # type: ignore[misc]
    assert cache.keep() == ""
    return matrices


def packed_anew(cache: PackedCache) -> list[str]:
    """The matrices that the cache has not, in their forms."""
    matrices = made()
    return [name for name, one in matrices.items() if cache.get(name, form_of(one), lambda one=one: one) is one]  # type: ignore[misc]


def test_what_was_packed_is_found_again_at_cache_lines(tmp_path: Path) -> None:
    matrices = filled(tmp_path / "weights" / "a.safetensors")
    again = PackedCache(tmp_path / "weights" / "a.safetensors")
    for name, meant in matrices.items():
        found = again.get(name, form_of(meant), never)
        assert (found.kind, found.rows, found.columns) == (meant.kind, meant.rows, meant.columns)
        for one, other in ((found.weights, meant.weights), (found.scales, meant.scales), (found.bias, meant.bias)):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.data_ptr() % ALIGNMENT == 0 and one.dtype == other.dtype and torch.equal(one, other)
    with pytest.raises(AssertionError, match="packed again"):
        again.get("another", form_of(matrices["q8"]), never)
    assert again.keep() == "" and sorted(path.name for path in (tmp_path / "weights").iterdir()) == [".lock", "a.safetensors"]


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"\xff" * 64 + data[64:]])
def test_a_damaged_file_is_packed_again(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "a.safetensors"
    matrices = filled(path)
    path.write_bytes(damage(path.read_bytes()))
    cache = PackedCache(path)
    assert packed_anew(cache) == list(matrices)
    assert cache.keep() == ""
    assert packed_anew(PackedCache(path)) == []


def test_a_few_files_are_kept_those_used_last(tmp_path: Path) -> None:
    for number in range(packed_cache.KEPT_FILES + 2):
        filled(tmp_path / f"{number}.safetensors")
        os.utime(tmp_path / f"{number}.safetensors", (number, number))
    PackedCache(tmp_path / "2.safetensors")  # used
    filled(tmp_path / "new.safetensors")
    assert sorted(path.stem for path in tmp_path.glob("*.safetensors")) == ["2", "4", "5", "new"]


def test_a_file_that_cannot_be_marked_as_used_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "a.safetensors")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(packed_cache.os, "utime", refused)
    assert packed_anew(PackedCache(tmp_path / "a.safetensors")) == []


@pytest.mark.parametrize(
    "said",
    [
        "1 80 64",  # more rows than there are weights for
        "1 48 128",
        "1 -48 -64",
        "0 48 64",  # another kind
        "2 48 64",
        "1 48 48",  # no whole groups
        "1 60 64",  # the bytes are those of 64 rows, but the model has 48
    ],
)
def test_sizes_that_the_parts_or_the_model_do_not_have_are_not_believed(tmp_path: Path, said: str) -> None:
    path = tmp_path / "a.safetensors"
    filled(path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip().replace(b'"q8": "1 48 64"', f'"q8": "{said}"'.encode()).ljust(length)
    assert len(header) == length and f'"{said}"'.encode() in header
    path.write_bytes(data[:8] + header + data[8 + length :])
    assert packed_anew(PackedCache(path)) == ["q8"]


@pytest.mark.parametrize(
    ("name", "part"), [(name, part) for name, one in made().items() for part in PARTS if getattr(one, part) is not None]
)
@pytest.mark.parametrize("damage", [lambda one: one[: len(one) // 2], lambda one: one.view(torch.int8)], ids=["half", "bytes"])
def test_every_part_has_its_shape_and_dtype(tmp_path: Path, name: str, part: str, damage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, matrices = tmp_path / "a.safetensors", made()
    monkeypatch.setitem(packed_cache._DTYPES, torch.int8, "I8")
    changed = dataclasses.replace(matrices[name], **{part: damage(getattr(matrices[name], part))})
    packed_cache._write(path, {**matrices, name: changed})
    assert packed_anew(PackedCache(path)) == [name]


def test_no_quantised_matrix_without_scales(tmp_path: Path) -> None:
    path, matrices = tmp_path / "a.safetensors", made()
    packed_cache._write(path, {**matrices, "q4": dataclasses.replace(matrices["q4"], scales=None)})
    assert packed_anew(PackedCache(path)) == ["q4"]


OTHERS = [Form((Kind.Q4,), 48, 64), Form((Kind.Q8,), 32, 64), Form((Kind.Q8,), 48, 32), Form((Kind.Q8,), 48, 64, True)]


@pytest.mark.parametrize("form", OTHERS, ids=str)
def test_a_matrix_of_another_form_is_not_the_models(tmp_path: Path, form: Form) -> None:
    path, matrices = tmp_path / "a.safetensors", made()
    filled(path)
    assert PackedCache(path).get("q8", Form((Kind.Q8, Kind.Q4), 48, 64), never).kind is Kind.Q8
    assert PackedCache(path).get("q8", form, lambda: matrices["q8"]) is matrices["q8"]


def test_a_directory_of_its_own(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        filled(tmp_path / "weights" / "a.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "weights").stat().st_mode & 0o777 == 0o700


def refused(path: Path) -> str:
    cache = PackedCache(path)
    assert packed_anew(cache) == list(made()), "nothing is read"
    return cache.keep()


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights" / "a.safetensors"
    filled(path)
    for mode in (0o770, 0o702):
        path.parent.chmod(mode)
        assert "can be written by others" in refused(path)
    path.parent.chmod(0o700)
    assert packed_anew(PackedCache(path)) == []
    if os.getuid() == 0:
        os.chown(path.parent, 12345, -1)
    else:
        monkeypatch.setattr(packed_cache.os, "geteuid", lambda: 12345)
    said = refused(path)
    assert "belongs to another user" in said and "\n" not in said
    assert sorted(each.name for each in path.parent.iterdir()) == [".lock", "a.safetensors"]


def test_what_root_left_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid():
        pytest.skip("only root can leave what another user finds: run as root")
    filled(tmp_path / "weights" / "a.safetensors")
    monkeypatch.setattr(packed_cache.os, "geteuid", lambda: 12345)
    assert packed_anew(PackedCache(tmp_path / "weights" / "a.safetensors")) == []


def test_one_packs_and_the_others_wait_for_it(tmp_path: Path) -> None:
    path, matrices = tmp_path / "weights" / "a.safetensors", made()
    first, second = PackedCache(path), PackedCache(path)
    packed: list[str] = []
    for name, one in matrices.items():
        first.get(name, form_of(one), lambda one=one: one)  # type: ignore[misc]
    waiter = threading.Thread(target=lambda: packed.extend(["began", *packed_anew(second)]))
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive() and packed == []
    assert first.keep() == ""
    waiter.join(30)
    assert packed == ["began"], "all of it was found"
    assert second.keep() == ""


def test_a_holder_that_is_stuck_stops_nobody_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    monkeypatch.setattr(packed_cache, "LOCK_WAIT_S", 0.2)
    (tmp_path / f"{SCRATCH}of-the-holder").mkdir()
    with lock_file(tmp_path / ".lock", 0):
        waits: list[float] = []
        monkeypatch.setattr(packed_cache, "lock_file", lambda path, wait_s: waits.append(wait_s) or lock_file(path, wait_s))
        said = refused(path)
        assert waits == [0.2], "one wait, not one a matrix"
        assert said == f"packed in memory, for another process has kept {tmp_path / '.lock'} locked for 0.2 s"
    assert sorted(each.name for each in tmp_path.iterdir()) == [".lock", f"{SCRATCH}of-the-holder"], "only the holder writes and clears"
    filled(path)


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / f"{SCRATCH}left"
    left.mkdir()
    (left / "a.safetensors").write_bytes(b"half")
    filled(tmp_path / "a.safetensors")
    assert sorted(each.name for each in tmp_path.iterdir()) == [".lock", "a.safetensors"]


def test_a_failed_start_lets_others_pack(tmp_path: Path) -> None:
    cache = PackedCache(tmp_path / "a.safetensors")
    with pytest.raises(AssertionError, match="packed again"):
        cache.get("q8", form_of(made()["q8"]), never)
    with pytest.raises(TimeoutError):
        lock_file(tmp_path / ".lock", 0)
    cache.close()
    cache.close()
    lock_file(tmp_path / ".lock", 0).close()


def test_other_weights_another_file(tmp_path: Path) -> None:
    files = resolve(str(write_tiny_llama(tmp_path / "model", **FITTING)))
    first = cache_path(tmp_path, files, "w8a8")
    assert cache_path(tmp_path, files, "w8a8") == first != cache_path(tmp_path, files, "w4a8")
    os.utime(files.weights[0], (1, 1))
    assert cache_path(tmp_path, files, "w8a8") != first


def test_weights_replaced_in_place_are_packed_anew(tmp_path: Path) -> None:
    """With the size and the time of modification of those before, and changed where no sample of the fingerprint is."""
    model = write_tiny_llama(tmp_path / "model", **{**FITTING, "vocab_size": 8192})
    before = resolve(str(model))
    first, (weights,) = cache_path(tmp_path, before, "w8a8"), before.weights
    found, data = weights.stat(), bytearray(weights.read_bytes())
    data[100_000] ^= 0xFF
    time.sleep(0.02)  # a tick of the file system's clock
    weights.write_bytes(data)
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
    after = resolve(str(model))
    assert (after.fingerprint, weights.stat().st_size, weights.stat().st_mtime_ns) == (before.fingerprint, len(data), found.st_mtime_ns)
    assert cache_path(tmp_path, after, "w8a8") != first


CODE = ["packed.py", "packed_cache.py", "loader_cpu.py", "gguf_groups.py", "loader_gguf.py", "gguf_names.py", "config_gguf.py"]


@pytest.mark.parametrize("name", [*CODE, "loader_safetensors.py", "architectures.py", "gguf_header.py"])
def test_other_code_another_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve(str(write_tiny_llama(tmp_path / "model", **FITTING)))
    first, read = cache_path(tmp_path, files, "w8a8"), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b"# changed" if path.name == name else b""))
    assert cache_path(tmp_path, files, "w8a8") != first


def test_another_gguf_package_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve(str(write_tiny_llama(tmp_path / "model", **FITTING)))
    first = cache_path(tmp_path, files, "w8a8")
    monkeypatch.setattr(packed_cache.importlib.metadata, "version", lambda name: {"gguf": "0.0.0"}[name])
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
    assert len(list((tmp_path / "cache" / "weights").glob("*.safetensors"))) == 3


@needs_step
@pytest.mark.parametrize("form", ["w8a8", "w4a8"])
def test_matrices_with_biases_and_a_head_of_its_own_are_found_again(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_llama(tmp_path / "model", **FITTING, attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    monkeypatch.setattr(packed_cache, "cache_directory", lambda: tmp_path / "cache" / "kernels")
    first = logits_of(runner_of(model, quantization=form))
    monkeypatch.setattr("replica.models.loader_cpu.pack_groups", never)
    assert torch.equal(logits_of(runner_of(model, quantization=form)), first)


@needs_step
def test_a_start_that_fails_lets_others_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_llama(tmp_path / "model", **FITTING)
    monkeypatch.setattr(packed_cache, "cache_directory", lambda: tmp_path / "cache" / "kernels")

    def full(*_: object) -> None:
        raise MemoryError("no memory for the step")

    monkeypatch.setattr("replica.models.loader_cpu.Decoder", full)
    with pytest.raises(ModelError, match="no memory for the step") as caught:
        runner_of(model, quantization="w8a8")
    lock_file(tmp_path / "cache" / "weights" / ".lock", 0).close()
    assert caught.value.__cause__ is not None, "what failed, and its locals, are still there"


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
