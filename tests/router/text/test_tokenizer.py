from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.contract.gguf_header import read_gguf_header
from replica.contract.model_error import ModelError
from router.served_model import load_served_model
from router.text.tokenizer_file_error import TokenizerFileError
from router.text.tokenizer_files import tokenizer_from_gguf, tokenizer_from_json
from tests.router.smollm2 import gguf_path, smollm2
from tests.router.text import smollm2_vectors as vectors

tokenizer = smollm2().tokenizer


@pytest.mark.parametrize(("text", "ids"), [*vectors.TEXT_IDS.items(), *vectors.LOSSY_IDS.items(), (vectors.FAMILY, vectors.FAMILY_IDS)])
def test_ids_are_the_models(text: str, ids: list[int]) -> None:
    assert list(tokenizer.encode(text, parse_special=True, add_special=True)) == ids  # and no begin token is added


@pytest.mark.parametrize("text", [*vectors.TEXT_IDS, vectors.FAMILY])
def test_round_trip(text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, parse_special=True), skip_special=False) == text


@pytest.mark.parametrize(("ids", "text"), vectors.PARTIAL)
def test_cut_characters_read_as_one_replacement(ids: list[int], text: str) -> None:
    assert tokenizer.decode(ids) == text


def test_stray_bytes_decode_one_by_one() -> None:
    assert tokenizer.decode(vectors.LOSSY_IDS["\U00040000"]) == "\ufffd" * 3


def test_special_tokens_are_parsed_only_where_asked() -> None:
    assert list(tokenizer.encode(vectors.INJECTION, parse_special=True)) == vectors.INJECTION_SPECIAL
    assert list(tokenizer.encode(vectors.INJECTION, parse_special=False)) == vectors.INJECTION_PLAIN
    assert tokenizer.vocabulary.special_ids == vectors.SPECIAL_IDS


def test_digits_are_single_tokens() -> None:
    assert len(tokenizer.encode("1234567", parse_special=False)) == 7


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_the_lower_bound_is_one(text: str) -> None:
    assert tokenizer.tokens_at_least(text, 10**9) <= len(tokenizer.encode(text, parse_special=True))


def test_the_lower_bound_is_useful() -> None:
    assert tokenizer.tokens_at_least("word " * 800_000, 8192) == 4_000_000 // 81
    assert tokenizer.tokens_at_least("a b " * 1000, 8192) == 2000
    assert tokenizer.tokens_at_least("\x13" * 4_000_000, 8192) == 0  # has no token at all


def test_many_threads_get_what_one_gets() -> None:
    """No state is set per call, so 16 threads that mix both encoders and several lengths cannot disturb each other."""
    texts = [f"{word} {i}<|im_end|>" * (1 + i % 5) for i, word in enumerate(vectors.TEXT_IDS)]
    jobs = [(text, special) for text in texts for special in (True, False)]
    expected = [tokenizer.encode(text, parse_special=special) for text, special in jobs]

    def work(thread: int) -> bool:
        order = [(thread + i) % len(jobs) for i in range(400)]
        return all(tokenizer.encode(jobs[i][0], parse_special=jobs[i][1]) == expected[i] for i in order)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))


def _checkpoint(directory: Path, *, truncation: bool = False) -> Path:
    """A checkpoint's text files, with SmolLM2's vocabulary."""
    metadata = read_gguf_header(gguf_path()).metadata
    original = tokenizer_from_gguf(metadata)._special
    copy = tokenizers.Tokenizer.from_str(original.to_str())
    if truncation:
        copy.enable_truncation(3)
    copy.save(str(directory / "tokenizer.json"))
    config = {"chat_template": metadata["tokenizer.chat_template"], "eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_a_checkpoint_gives_the_same_ids(tmp_path: Path) -> None:
    other = load_served_model("other", _checkpoint(tmp_path))
    for text, ids in [*vectors.TEXT_IDS.items(), *vectors.LOSSY_IDS.items()]:
        assert list(other.tokenizer.encode(text, parse_special=True)) == ids
    assert list(other.tokenizer.encode(vectors.INJECTION, parse_special=False)) == vectors.INJECTION_PLAIN
    assert other.tokenizer.vocabulary == tokenizer.vocabulary
    assert other.template is not None


def test_truncation_in_the_file_is_not_ours(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path, truncation=True) / "tokenizer.json"
    text = "one two three four five"
    assert len(tokenizers.Tokenizer.from_file(str(path)).encode(text).ids) == 3  # the control: as it comes, it cuts
    assert len(tokenizer_from_json(path).encode(text, parse_special=True)) == 5


def test_byte_fallback_vocabulary(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "ab"]
    model = tokenizers.models.BPE(
        vocab={p: i for i, p in enumerate(pieces)}, merges=[("▁", "a"), ("a", "b")], byte_fallback=True, unk_token="<unk>"
    )
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    built.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    built.add_special_tokens(["<s>"])
    built.save(str(tmp_path / "tokenizer.json"))
    ours = tokenizer_from_json(tmp_path / "tokenizer.json")
    for text in ("a b ab", "é 😀 a"):
        ids = ours.encode(text, parse_special=True)
        assert ours.decode(ids) == built.decode(list(ids)) == text
    assert ours.decode(ours.encode("<s>a", parse_special=True), skip_special=False).startswith("<s>")


def test_broken_files_are_refused_in_one_line(tmp_path: Path) -> None:
    not_gguf, cut, bad = tmp_path / "a.gguf", tmp_path / "b.gguf", tmp_path / "tokenizer.json"
    not_gguf.write_bytes(b"hello")
    cut.write_bytes(gguf_path().read_bytes()[:5000])
    bad.write_text("{}")
    for path in (not_gguf, cut):
        with pytest.raises(ModelError) as caught:
            load_served_model("x", path)
        assert "\n" not in str(caught.value)
    with pytest.raises(TokenizerFileError, match="not a readable tokenizer"):
        load_served_model("x", tmp_path)
    with pytest.raises(TokenizerFileError, match="does not exist"):
        tokenizer_from_json(tmp_path / "none.json")
    with pytest.raises(TokenizerFileError, match="neither"):
        load_served_model("x", tmp_path / "weights.bin")
