"""A checkpoint small enough to be made and served in a test, with a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.replica.tiny_llama import SIZES, write_tiny_llama

CHAT_PROMPT, CHAT_TOKENS = 77, 24  # one token asked, so many answered


def write_tiny_served(directory: Path, **changes: Any) -> Path:
    from tokenizers import Tokenizer, models

    write_tiny_llama(directory, num_attention_heads=4, num_key_value_heads=2, **changes)
    words = {f"t{token}": token for token in range(SIZES["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(directory / "tokenizer.json"))
    return directory


def write_tiny_chat(directory: Path) -> Path:
    """One that answers a chat with what follows the words of its first message."""
    write_tiny_served(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}"}))
    return directory


def chat_body() -> dict[str, Any]:
    """A chat of `tiny` that says CHAT_PROMPT."""
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": f"t{CHAT_PROMPT}"}], "temperature": 0}
    return body | {"max_tokens": CHAT_TOKENS, "ignore_eos": True, "return_token_ids": True}
