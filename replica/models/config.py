"""From a model's files to its configuration."""

from __future__ import annotations

from replica.contract.gguf_header import read_gguf_header
from replica.contract.model_files import ModelFiles
from replica.models.config_gguf import config_of_gguf
from replica.models.config_json import config_of_json
from replica.models.model_config import ModelConfig, checked


def read_model_config(files: ModelFiles) -> ModelConfig:
    """Raises ModelError, naming the file and the key, for anything missing or not supported."""
    if files.kind == "gguf":
        return checked(config_of_gguf(read_gguf_header(files.gguf), files.gguf), files.gguf)
    where = files.directory / "config.json"
    return checked(config_of_json(where), where)
