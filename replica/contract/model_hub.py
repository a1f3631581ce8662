"""Files of a Hugging Face id: one revision, resolved once to a commit, and only the files that are needed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from replica.contract.model_error import ModelError

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
CONFIG_FILES = ("config.json", "generation_config.json")
SINGLE_WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def download(model: str, revision: str | None, *, weights: bool) -> tuple[Path, str]:
    """Directory and commit of `model`. Files come from the local cache where they are; progress goes to stderr.

    Without a network the cached snapshot serves. Raises ModelError when the id, the revision or the network fails.
    """
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        info = hub.HfApi().model_info(model, revision=revision)
        commit = info.sha or ""
        names = needed_files([entry.rfilename for entry in info.siblings or ()], model, weights=weights)
        directory = Path(hub.snapshot_download(model, revision=commit, allow_patterns=[*names]))
        return directory, commit
    except ModelError:
        raise
    except errors.GatedRepoError as error:  # before RepositoryNotFoundError, whose child it is
        raise ModelError(f"{model}: gated on Hugging Face: accept its terms there and set HF_TOKEN") from error
    except (errors.HFValidationError, errors.RepositoryNotFoundError) as error:
        raise ModelError(f"{model}: no such file or directory, and no such model on Hugging Face (or no access to it)") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{model}: no revision {revision!r} on Hugging Face") from error
    except Exception as error:  # no network, a proxy, a server's fault: whatever was downloaded before still serves
        return _cached(model, revision, error)


def _cached(model: str, revision: str | None, cause: Exception) -> tuple[Path, str]:
    import huggingface_hub as hub

    try:
        directory = Path(hub.snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:
        reason = str(cause).strip().splitlines() or [type(cause).__name__]
        raise ModelError(
            f"{model}: no such file or directory, not in the local cache, and Hugging Face cannot be reached ({reason[0][:160]})"
        ) from error
    return directory, directory.name


def needed_files(names: Sequence[str], model: str, *, weights: bool) -> tuple[str, ...]:
    """Of a repository's files, those that serve: configuration, tokenizer, template and, if asked for, safetensors weights."""
    root = [name for name in names if "/" not in name]
    if "config.json" not in root:
        raise ModelError(f"{model}: not a checkpoint on Hugging Face (it has no config.json)")
    chosen = [name for name in (*CONFIG_FILES, *TEXT_FILES) if name in root]
    if not weights:
        return tuple(chosen)
    if WEIGHTS_INDEX in root:
        chosen.append(WEIGHTS_INDEX)
        chosen += sorted(name for name in root if name.startswith("model-") and name.endswith(".safetensors"))
    elif SINGLE_WEIGHTS in root:
        chosen.append(SINGLE_WEIGHTS)
    elif any(name.endswith(PICKLES) for name in root):
        raise ModelError(f"{model}: has only pickle weights (.bin), which can run code when they are read; convert it to safetensors")
    else:
        raise ModelError(f"{model}: has no {SINGLE_WEIGHTS} and no {WEIGHTS_INDEX}")
    return tuple(chosen)


def shard_paths(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint directory, in the order of their names; every one exists. ModelError otherwise."""
    index = directory / WEIGHTS_INDEX
    if index.is_file():
        return _indexed_shards(index)
    single = directory / SINGLE_WEIGHTS
    if single.is_file():
        return (single,)
    found = tuple(sorted(directory.glob("*.safetensors")))
    if found:
        return found
    if any(path.suffix in PICKLES for path in directory.iterdir()):
        raise ModelError(f"{directory}: has only pickle weights (.bin), which can run code when they are read; convert it to safetensors")
    raise ModelError(f"{directory}: not a checkpoint (no *.safetensors)")


def _indexed_shards(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: broken index of shards") from error
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise ModelError(f"{index}: broken index of shards (file names expected)")
    paths = tuple(index.parent / name for name in names)
    for path in paths:
        if not path.is_file():
            raise ModelError(f"{path}: missing shard ({index.name} names {len(paths)})")
    return paths
