"""What the router needs of a model: its name, tokenizer and chat template. No weights."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replica.contract.gguf_header import MetadataValue, read_gguf_header
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from router.text.tokenizer_file_error import TokenizerFileError
from router.text.tokenizer_files import tokenizer_from_gguf, tokenizer_from_json


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str  # in the API
    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: a base model; chat is refused
    created_s: int = field(default_factory=lambda: int(time.time()))  # Unix time, for /v1/models


def load_served_model(name: str, path: Path) -> ServedModel:
    """From a .gguf file or a checkpoint's directory. Raises ModelError or ValueError with one clear line, or OSError."""
    if path.is_dir():
        tokenizer, template = tokenizer_from_json(path / "tokenizer.json"), _template_from_directory(path)
    elif path.suffix == ".gguf":
        metadata = read_gguf_header(path).metadata
        tokenizer, template = tokenizer_from_gguf(metadata), _template_from_gguf(metadata)
    else:
        raise TokenizerFileError(f"{path} is neither a .gguf file nor a directory")
    return ServedModel(name, tokenizer, template)


def _template_from_gguf(metadata: dict[str, MetadataValue]) -> ChatTemplate | None:
    source = metadata.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return None
    tokens = metadata["tokenizer.ggml.tokens"]

    def token(key: str) -> str:
        index = metadata.get(f"tokenizer.ggml.{key}")
        return str(tokens[index]) if isinstance(tokens, list) and isinstance(index, int) and index < len(tokens) else ""

    return ChatTemplate(source, bos_token=token("bos_token_id"), eos_token=token("eos_token_id"))


def _template_from_directory(directory: Path) -> ChatTemplate | None:
    config = _json_object(directory / "tokenizer_config.json")
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        source: Any = jinja.read_text()
    else:
        source = _json_object(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(source, list):  # several by name
        source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}.get("default")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, bos_token=_token(config.get("bos_token")), eos_token=_token(config.get("eos_token")))


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise TokenizerFileError(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _token(value: Any) -> str:
    """A token in tokenizer_config.json: its text, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
