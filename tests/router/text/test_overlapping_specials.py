"""Special tokens that overlap: interrupting one must not leave another whole."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from router.text.chat_template import ChatTemplate, Conversation
from router.text.tokenizer import Tokenizer
from router.text.tokenizer_files import _vocabulary


def tokenizer_with(specials: list[str]) -> Tokenizer:
    """Bytes, and `specials`."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    encoders = []
    for added in (specials, []):
        encoder = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        encoder.decoder = decoders.ByteLevel()
        encoder.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in added])
        encoders.append(encoder)
    special, plain = encoders
    return Tokenizer(special, plain, _vocabulary(special, byte_level=True, strip_first_space=False))


@pytest.mark.parametrize(
    ("specials", "content"),
    [
        (["<a>", "a>b"], "<a>b"),
        (["[INST]", "T]["], "[INST]["),
        (["<<<", "<<b"], "<<<b"),
        (["abcd", "bc", "cde", "def"], "abcdef"),
    ],
)
def test_content_brings_none_of_them(specials: list[str], content: str) -> None:
    tokenizer = tokenizer_with(specials)
    template = ChatTemplate(specials[0] + "{{ messages[0].content }}" + specials[0])
    rendered = template.render(Conversation([{"role": "user", "content": content}]), tokenizer)
    ids = tokenizer.encode_guarded(rendered.text, rendered.guard)
    special = [i for i in ids if i in tokenizer.vocabulary.special_ids]
    assert special == [ids[0], ids[-1]] and ids[0] == ids[-1], "the template's own"
    assert tokenizer.decode(ids, skip_special=False) == specials[0] + content + specials[0]


def test_a_variable_named_like_a_field_is_guarded_too() -> None:
    tokenizer = tokenizer_with(["<a>"])
    template = ChatTemplate("{{ role }}{{ messages[0].role }}")
    rendered = template.render(Conversation([{"role": "user", "content": ""}], variables={"role": "<a>"}), tokenizer)
    ids = tokenizer.encode_guarded(rendered.text, rendered.guard)
    assert tokenizer.vocabulary.special_ids.isdisjoint(ids) and tokenizer.decode(ids) == "<a>user"
