"""Tokenizers of GGUF files against the same rules said otherwise: a published tokenizer.json, and SentencePiece's own way."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from router.text.gguf_encoder import encoder_from_gguf
from router.text.tokenizer import Tokenizer
from router.text.tokenizer_file_error import TokenizerFileError
from router.text.tokenizer_files import tokenizer_from_gguf

TEXTS = [
    "Hello, world! I'LL say it's 1234567 times, we'Ve seen 3.14159.\r\n\r\n\tdef f(x):\n\t\treturn x  \n   ",
    "  leading, trailing   ",
    "über die Straße №12³ ½ кафе́ 東京 🙂🙂 e\u0301 a\u00a0b",
    "x=='y'\n\n\n!!\n 'tis '1 _'s",
    "",
    " ",
    "\n",
    "0123456789 98765",
]
# As the published files of Llama 3 and of Qwen2 write them, tokenizer.json.
WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PUBLISHED = {
    "llama-bpe": {"Regex": WORD % r"\p{N}{1,3}"},
    "qwen2": {"Regex": WORD % r"\p{N}"},
}


def trained(name: str) -> tokenizers.Tokenizer:
    """A tokenizer with the published rules, whose merges come from the texts."""
    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.decoder = decoders.ByteLevel()
    definition = json.loads(encoder.to_str())
    split = {"type": "Split", "pattern": PUBLISHED[name], "behavior": "Isolated", "invert": False}
    definition["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, definition["pre_tokenizer"]]}
    definition["normalizer"] = {"type": "NFC"} if name == "qwen2" else None
    encoder = tokenizers.Tokenizer.from_str(json.dumps(definition))
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    encoder.train_from_iterator(TEXTS * 4, trainer)
    return encoder


def header(name: str, encoder: tokenizers.Tokenizer, *more: tuple[str, int]) -> dict[str, Any]:
    """What a GGUF file says of it; `more`: tokens and their types."""
    model = json.loads(encoder.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), *(token for token, _ in more)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(model["vocab"]) + [kind for _, kind in more],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
    }


@pytest.fixture(scope="module", params=PUBLISHED)
def pair(request: pytest.FixtureRequest) -> tuple[str, tokenizers.Tokenizer, Tokenizer]:
    encoder = trained(request.param)
    return request.param, encoder, tokenizer_from_gguf(header(request.param, encoder))


@pytest.mark.parametrize("text", TEXTS)
def test_the_ids_of_the_published_rules(pair: tuple[str, tokenizers.Tokenizer, Tokenizer], text: str) -> None:
    name, published, ours = pair
    ids = ours.encode(text, parse_special=True)
    assert list(ids) == published.encode(text).ids
    assert ours.decode(ids) == (text.replace("e\u0301", "é").replace("а\u0301", "а́") if name == "qwen2" else text)


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("aZé\u0301東 '\u00a0\t\r\n019½.,!_slLre🙂"), max_size=40))
def test_any_text(text: str) -> None:
    for name, (published, ours) in PAIRS.items():
        ids = ours.encode(text, parse_special=False)
        assert list(ids) == published.encode(text).ids, name
        assert ours.tokens_at_least(text, 10**9) <= len(ids)


PAIRS = {name: (made := trained(name), tokenizer_from_gguf(header(name, made))) for name in PUBLISHED}


def test_the_rules_differ_where_it_is_said() -> None:
    """The control: no name stands for another's rules."""
    encoder = trained("qwen2")
    lengths = {}
    for name in ("gpt-2", "smollm", "qwen2", "llama-bpe"):
        words = encoder_from_gguf(header(name, encoder)).pre_tokenizer.pre_tokenize_str("a 12345's\n\n(x)")
        lengths[name] = [word for word, _ in words]
    assert lengths["llama-bpe"] == ["a", "Ġ", "123", "45", "'s", "ĊĊ", "(x", ")"]
    assert lengths["qwen2"] == ["a", "Ġ", "1", "2", "3", "4", "5", "'s", "ĊĊ", "(x", ")"]
    assert lengths["gpt-2"] == ["a", "Ġ12345", "'s", "Ċ", "Ċ", "(", "x", ")"]
    assert lengths["smollm"] == ["a", "Ġ", "1", "2", "3", "4", "5", "'s", "Ċ", "Ċ", "(", "x", ")"]


def test_a_whole_word_needs_no_merges_in_llama_3() -> None:
    encoder = trained("llama-bpe")
    for name, tokens in (("llama-bpe", 1), ("qwen2", 4)):
        ours = tokenizer_from_gguf(header(name, encoder, ("qzqz", 1)))
        assert len(ours.encode("qzqz", parse_special=True)) == tokens


def test_who_begins_with_a_token_of_its_own() -> None:
    encoder = trained("llama-bpe")
    for name, said, begins in (("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False), ("qwen2", True, True)):
        metadata = header(name, encoder, ("<s>", 3))
        bos = metadata["tokenizer.ggml.bos_token_id"] = len(metadata["tokenizer.ggml.tokens"]) - 1
        if said is not None:
            metadata["tokenizer.ggml.add_bos_token"] = said
        ours = tokenizer_from_gguf(metadata)
        assert (ours.encode("a", parse_special=True, add_special=True)[0] == bos) is begins
        assert bos not in ours.encode("a", parse_special=True) and bos in ours.vocabulary.special_ids


def test_user_defined_tokens_are_found_everywhere_and_shown() -> None:
    metadata = header("qwen2", trained("qwen2"), ("<tool_call>", 4), ("<|im_end|>", 3))
    tool, end = (len(metadata["tokenizer.ggml.tokens"]) - back for back in (2, 1))
    ours = tokenizer_from_gguf(metadata)
    plain = ours.encode("a<tool_call>b<|im_end|>", parse_special=False)
    assert tool in plain and end not in plain
    assert ours.decode(plain) == "a<tool_call>b<|im_end|>"
    assert ours.encode("<tool_call><|im_end|>", parse_special=True) == (tool, end)
    assert ours.decode((tool, end)) == "<tool_call>"


PIECES = {"▁": -3.0, "a": -4.0, "b": -5.0, "c": -6.0, "é": -7.0, "aa": -1.5, "▁a": -1.0, "ab": -0.5, "abc": -0.25, "▁ab": -2.0, "aab": -2.5}


def sentence_piece_header(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(PIECES.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def pieces_of(text: str) -> Iterator[str]:
    """SentencePiece's way: of all neighbours that make a piece, those of the highest score first, of equals the leftmost."""
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        able = [(-PIECES[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in PIECES]
        if not able:
            break
        _, at = min(able)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    for part in parts:
        yield from [part] if part in PIECES else [f"<0x{byte:02X}>" for byte in part.encode()]


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("aabbc é東🙂"), max_size=30))
def test_sentence_piece(text: str) -> None:
    ids = SENTENCE_PIECE.encode(text, parse_special=False)
    assert [SENTENCE_TOKENS[i] for i in ids] == list(pieces_of(text))
    assert SENTENCE_PIECE.decode(ids) == text
    assert SENTENCE_PIECE.tokens_at_least(text, 10**9) <= len(ids)


SENTENCE_PIECE = tokenizer_from_gguf(sentence_piece_header())
SENTENCE_TOKENS = sentence_piece_header()["tokenizer.ggml.tokens"]


def test_what_a_sentence_piece_file_may_say() -> None:
    assert SENTENCE_PIECE.encode("a", parse_special=True, add_special=True)[0] == 1, "begins with <s>, unless it says otherwise"
    without = tokenizer_from_gguf(sentence_piece_header(add_bos_token=False, add_space_prefix=False))
    ids = without.encode("ab", parse_special=True, add_special=True)
    assert [SENTENCE_TOKENS[i] for i in ids] == ["ab"] and without.decode(ids) == "ab"
    spaced = without.encode(" ab", parse_special=True)
    assert without.decode(spaced) == " ab", "a space of the text's own stays"
    assert [SENTENCE_TOKENS[i] for i in SENTENCE_PIECE.encode("a</s>a", parse_special=True)] == ["▁a", "</s>", "▁a"]
    assert 2 not in SENTENCE_PIECE.encode("a</s>a", parse_special=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.model": "bert"}, "GGUF tokenizer 'bert' .* is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported .*'qwen2'"),
        ({"tokenizer.ggml.merges": None}, "merges of the GGUF file is not a list"),
        ({"tokenizer.ggml.merges": ["no such"]}, "tokenizer of the GGUF file is broken"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer of the GGUF file is broken"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 9999}, "tokenizer of the GGUF file is broken"),
        ({"tokenizer.ggml.model": "llama"}, "has no tokenizer.ggml.scores"),
    ],
)
def test_reasons(change: dict[str, Any], reason: str) -> None:
    metadata = {**header("qwen2", trained("qwen2")), **change}
    with pytest.raises(TokenizerFileError, match=reason) as caught:
        tokenizer_from_gguf(metadata)
    assert "\n" not in str(caught.value)
