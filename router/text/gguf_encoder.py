"""Encoders from the header of a GGUF file: byte-level BPE by the name of its pre-tokenizer, and SentencePiece's BPE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from replica.contract.gguf_header import MetadataValue
from router.text.tokenizer_file_error import TokenizerFileError

SENTENCE_PIECE = "llama"  # kinds of tokenizer, in tokenizer.ggml.model
BYTE_LEVEL = "gpt2"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types
_SPACE = "▁"


@dataclass(frozen=True, slots=True)
class _Rules:
    """How a byte-level tokenizer cuts a text into words before it merges."""

    word: str = ""  # a regular expression; "": that of GPT-2
    digits_apart: bool = False
    composes: bool = False  # NFC first
    whole_words: bool = False  # a word that is a token needs no merges to it
    adds_bos: bool = False  # unless the file says so


def _words(digits: str) -> str:
    """Contractions, letters with one sign before them, `digits`, signs with line ends behind them, line ends, spaces."""
    return r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_LLAMA3 = _Rules(_words(r"\p{N}{1,3}"), whole_words=True, adds_bos=True)
_BY_NAME = {
    "gpt-2": _Rules(),
    "smollm": _Rules(digits_apart=True),
    "qwen2": _Rules(_words(r"\p{N}"), composes=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


def encoder_from_gguf(metadata: Mapping[str, MetadataValue], *, special: bool = True) -> tokenizers.Tokenizer:
    """`special`: it reads control tokens in the text and adds what the model wants around it. Raises TokenizerFileError."""
    rules = None if metadata.get("tokenizer.ggml.model") == SENTENCE_PIECE else _rules(metadata)
    try:
        tokens, types = [str(token) for token in _list(metadata, "tokens")], _list(metadata, "token_type")
        encoder = _byte_level(rules, tokens, _list(metadata, "merges")) if rules else _sentence_piece(metadata, tokens)
        _add_tokens(encoder, tokens, types, special=special)
        bos, adds_bos = metadata.get("tokenizer.ggml.bos_token_id"), rules is None or rules.adds_bos
        if special and metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and isinstance(bos, int):
            encoder.post_processor = processors.TemplateProcessing(single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)])
        return encoder
    except KeyError as error:
        raise TokenizerFileError(f"the GGUF file has no {error.args[0]}") from None
    except TokenizerFileError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise TokenizerFileError(f"the tokenizer of the GGUF file is broken: {error}") from error


def _rules(metadata: Mapping[str, MetadataValue]) -> _Rules:
    kind, name = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    rules = _BY_NAME.get(str(name))
    if kind != BYTE_LEVEL or rules is None:
        raise TokenizerFileError(
            f"GGUF tokenizer {kind!r} with pre-tokenizer {name!r} is not supported "
            f"({SENTENCE_PIECE!r} is, and {BYTE_LEVEL!r} with {', '.join(map(repr, _BY_NAME))})"
        )
    return rules


def _byte_level(rules: _Rules, tokens: Sequence[str], merges: Sequence[MetadataValue]) -> tokenizers.Tokenizer:
    pairs = [(left, right) for left, _, right in (str(merge).partition(" ") for merge in merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    encoder = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=rules.whole_words))
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if rules.digits_apart else []
    if rules.word:
        steps.append(pre_tokenizers.Split(Regex(rules.word), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rules.word))
    encoder.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if rules.composes:
        encoder.normalizer = normalizers.NFC()
    encoder.decoder = decoders.ByteLevel()
    return encoder


def _sentence_piece(metadata: Mapping[str, MetadataValue], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Its file has scores instead of merges: two pieces may be merged where a token says so, the highest score first."""
    scores = [float(score) for score in _list(metadata, "scores") if isinstance(score, (int, float))]
    ids = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[float, int, int]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-score, left, right))
    merges.sort()
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    encoder = tokenizers.Tokenizer(
        models.BPE(
            vocab=ids,
            merges=[(tokens[left], tokens[right]) for _, left, right in merges],
            unk_token=tokens[unknown] if isinstance(unknown, int) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    if adds_space(metadata):
        spaces.insert(0, normalizers.Prepend(_SPACE))
    encoder.normalizer = normalizers.Sequence(spaces)
    encoder.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return encoder


def adds_space(metadata: Mapping[str, MetadataValue]) -> bool:
    """Whether a text is read as if it began with a space."""
    return metadata.get("tokenizer.ggml.model") == SENTENCE_PIECE and bool(metadata.get("tokenizer.ggml.add_space_prefix", True))


def _add_tokens(encoder: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[MetadataValue], *, special: bool) -> None:
    """Tokens that are found in a text before it is cut: control tokens where asked, user-defined ones always."""
    if special:
        control = [token for token, kind in zip(tokens, types, strict=True) if kind in (_UNKNOWN, _CONTROL)]
        encoder.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    own = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    encoder.add_tokens([AddedToken(token, special=False, normalized=False) for token in own])


def _list(metadata: Mapping[str, MetadataValue], name: str) -> list[MetadataValue]:
    key = f"tokenizer.ggml.{name}"
    value = metadata[key]
    if not isinstance(value, list):
        raise TokenizerFileError(f"{key} of the GGUF file is not a list")
    return value
