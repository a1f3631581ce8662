"""A token as a JSON string is what the token reads as alone, or nothing where that says nothing."""

import orjson
import pytest

from router.text.detokenizer import Detokenizer
from tests.router.smollm2 import smollm2


@pytest.mark.parametrize("skip_special", [True, False])
def test_each_is_what_the_detokenizer_says_of_it_alone(skip_special: bool) -> None:
    tokenizer = smollm2().tokenizer
    texts = tokenizer.json_texts(skip_special=skip_special)
    parts = 0
    for token_id, data in enumerate(tokenizer.table(skip_special=skip_special)):
        detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        text = detokenizer.push((token_id,))
        if detokenizer.holds or not text or text.encode() != data:
            parts += 1
            assert texts[token_id] == b""
        else:
            assert orjson.loads(texts[token_id]) == text
    assert 100 < parts < 1_000, "some are parts of characters"
    assert len(texts) == tokenizer.vocab_size
    with pytest.raises(IndexError):
        texts[tokenizer.vocab_size]
