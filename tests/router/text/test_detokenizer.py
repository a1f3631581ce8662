from __future__ import annotations

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.detokenizer import Detokenizer
from tests.router.smollm2 import smollm2
from tests.router.text.smollm2_vectors import BYTE_IDS, FAMILY, FAMILY_IDS, PARTIAL, TEXT_IDS

tokenizer = smollm2().tokenizer
library: tokenizers.Tokenizer = tokenizer._special

CHARACTERS = {**{text: ids for text, ids in TEXT_IDS.items() if "<|" not in text and text != "\ufffd"}, FAMILY: FAMILY_IDS}
SEQUENCES = st.lists(
    st.one_of(
        st.lists(st.sampled_from(BYTE_IDS), min_size=1, max_size=4),
        st.lists(st.integers(0, 49151), min_size=1, max_size=3),
        st.sampled_from([[7906, 240], [10813, 242, 218], [24211], [2]]),
    ),
    max_size=12,
).map(lambda parts: [i for part in parts for i in part])


def in_pieces(ids: list[int], sizes: list[int]) -> list[str]:
    """The texts sent when the ids come in pieces of these sizes, over and over; the flush is the last."""
    detokenizer = Detokenizer(tokenizer)
    texts: list[str] = []
    start = step = 0
    while start < len(ids):
        size = sizes[step % len(sizes)]
        texts.append(detokenizer.push(ids[start : start + size]))
        start, step = start + size, step + 1
    return [*texts, detokenizer.flush()]


@settings(max_examples=600, deadline=None)
@given(SEQUENCES, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_pieces_add_up_to_the_decoding_of_all(ids: list[int], sizes: list[int]) -> None:
    assert "".join(in_pieces(ids, sizes)) == library.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)


def test_no_piece_ends_inside_a_character() -> None:
    for text, ids in CHARACTERS.items():
        for size in (1, 3):
            pieces = in_pieces(ids, [size])
            assert "".join(pieces) == text
            assert not any("\ufffd" in piece for piece in pieces)


def test_decoding_each_token_alone_would_break_characters() -> None:
    """The control: what the guard is there for."""
    assert "".join(tokenizer.decode([i]) for i in CHARACTERS["😀"]) != "😀"


def test_what_is_complete_is_never_held() -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([24211]) == "\ufffd"  # the token of U+FFFD itself is no broken character
    assert detokenizer.push([260]) == " the"
    assert detokenizer.push([10813]) == ""  # two bytes of four
    assert detokenizer.flush() == "\ufffd"


def test_a_text_cut_inside_a_character_ends_as_decoding_does() -> None:
    for ids, text in PARTIAL:
        assert "".join(in_pieces(ids, [1])) == text


def test_special_tokens_show_when_asked_for() -> None:
    assert Detokenizer(tokenizer).push([28120, 2]) == "hello"
    assert Detokenizer(tokenizer, skip_special=False).push([28120, 2]) == "hello<|im_end|>"
