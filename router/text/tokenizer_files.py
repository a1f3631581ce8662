"""Tokenizers from model files: the header of a GGUF file, or tokenizer.json of a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from replica.contract.gguf_header import MetadataValue
from router.text.gguf_encoder import BYTE_LEVEL, adds_space, encoder_from_gguf
from router.text.tokenizer import Tokenizer, Vocabulary
from router.text.tokenizer_file_error import TokenizerFileError

_FALLBACK_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_NFC_SHRINK = 4  # bytes before ÷ bytes after composing, at most


def tokenizer_from_gguf(metadata: Mapping[str, MetadataValue]) -> Tokenizer:
    """From a GGUF header. Raises TokenizerFileError for kinds that are not supported."""
    special, plain = (encoder_from_gguf(metadata, special=special) for special in (True, False))
    byte_level = metadata.get("tokenizer.ggml.model") == BYTE_LEVEL
    shrink = _NFC_SHRINK if isinstance(special.normalizer, normalizers.NFC) else 1
    return Tokenizer(special, plain, _vocabulary(special, byte_level=byte_level, strip_first_space=adds_space(metadata)), shrink)


def tokenizer_from_json(path: Path) -> Tokenizer:
    """From a checkpoint's tokenizer.json: byte-level BPE, or SentencePiece-like with byte fallback."""
    try:
        text = path.read_text()
        definition = json.loads(text)
        special, plain = tokenizers.Tokenizer.from_str(text), tokenizers.Tokenizer.from_str(text)
    except FileNotFoundError:
        raise TokenizerFileError(f"{path} does not exist") from None
    except Exception as error:  # the library raises bare Exceptions
        raise TokenizerFileError(f"{path} is not a readable tokenizer: {error}") from error
    plain.encode_special_tokens = True
    parts = _parts(definition.get("decoder"))
    byte_level = "ByteLevel" in parts
    normalizers = set(_parts(definition.get("normalizer")))
    shrink = 1 if not normalizers else _NFC_SHRINK if normalizers == {"NFC"} else 0
    strip = not byte_level and bool({"Strip", "Metaspace"} & set(parts))
    return Tokenizer(special, plain, _vocabulary(special, byte_level=byte_level, strip_first_space=strip), shrink)


def _vocabulary(encoder: tokenizers.Tokenizer, *, byte_level: bool, strip_first_space: bool) -> Vocabulary:
    by_token: dict[str, int] = encoder.get_vocab(with_added_tokens=True)
    added = encoder.get_added_tokens_decoder()
    alphabet = _byte_of_character()
    token_bytes = [b""] * (max(by_token.values()) + 1)
    for token, index in by_token.items():
        if index in added:
            token_bytes[index] = token.encode()
        elif byte_level:
            token_bytes[index] = _byte_level(token, alphabet)
        else:
            token_bytes[index] = _byte_fallback(token)
    words_apart = byte_level and not any(len(token.split()) > 1 for token in token_bytes)
    single = {token for token in token_bytes if len(token) == 1}
    lost = bytes(b for b in range(256) if bytes((b,)) not in single) if byte_level else b""
    return Vocabulary(tuple(token_bytes), frozenset(i for i, token in added.items() if token.special), lost, strip_first_space, words_apart)


def _byte_level(token: str, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:  # not spelled in the alphabet: it stands for itself
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    match = _FALLBACK_BYTE.fullmatch(token)
    return bytes((int(match.group(1), 16),)) if match else token.replace("▁", " ").encode()


def _byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies spell printable Latin-1 bytes as themselves and the others, in order, from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in sorted(printable)} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _parts(component: Any) -> list[str]:
    """Types of a tokenizer.json component, a Sequence unfolded."""
    if not isinstance(component, dict):
        return []
    children = component.get("decoders") or component.get("normalizers")
    if component.get("type") == "Sequence" and isinstance(children, list):
        return [part for child in children for part in _parts(child)]
    return [str(component.get("type"))]
