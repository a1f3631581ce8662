"""A checkpoint small enough to be made and served in a test, with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.replica.tiny_llama import SIZES, write_tiny_llama


def write_tiny_served(directory: Path, **changes: Any) -> Path:
    from tokenizers import Tokenizer, models

    write_tiny_llama(directory, num_attention_heads=4, num_key_value_heads=2, **changes)
    words = {f"t{token}": token for token in range(SIZES["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(directory / "tokenizer.json"))
    return directory
