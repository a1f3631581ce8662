"""Text to token ids and token ids to bytes.

Free of per-call state, so any number of threads may use one Tokenizer. Two encoders
share the vocabulary: one reads special tokens in the text, the other treats them as characters.

Text is a pure function of the token list: each id stands for a fixed run of bytes, a text is their concatenation read
as UTF-8, and what is not UTF-8 reads as U+FFFD. So a text can be cut, streamed and resumed anywhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers

from router.text.json_texts import JsonTexts


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What each id stands for. `token_bytes[i]` is b"" for an id that stands for nothing."""

    token_bytes: tuple[bytes, ...]
    special_ids: frozenset[int]  # control tokens: never shown, never read from a message's content
    lost_bytes: bytes  # bytes of a text that have no token and vanish when it is encoded
    strip_first_space: bool  # a text's first token carries a space that the text does not have
    words_apart: bool  # no token reaches from one word into the next


class Tokenizer:
    """`special` parses special tokens and adds what the model wants around a text; `plain` does neither."""

    __slots__ = (
        "_json_texts",
        "_longest_token_bytes",
        "_plain",
        "_shown",
        "_shrink",
        "_special",
        "special_characters_max",
        "special_ends",
        "special_pattern",
        "vocabulary",
    )

    def __init__(self, special: tokenizers.Tokenizer, plain: tokenizers.Tokenizer, vocabulary: Vocabulary, shrink: int = 1) -> None:
        """`shrink`: by how much normalising may shorten a text in bytes; 0 = unknown. Both encoders become ours alone."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time: a second pool of threads only gets in the way
        for encoder in (special, plain):
            encoder.no_truncation()
            encoder.no_padding()
        self._special = special
        self._plain = plain
        self._shrink = shrink
        self.vocabulary = vocabulary
        self._longest_token_bytes = max(map(len, vocabulary.token_bytes))
        self._shown = tuple(b"" if i in vocabulary.special_ids else token for i, token in enumerate(vocabulary.token_bytes))
        self._json_texts = {True: JsonTexts(self._shown), False: JsonTexts(vocabulary.token_bytes)}
        contents = sorted((vocabulary.token_bytes[i].decode() for i in vocabulary.special_ids), key=lambda text: (-len(text), text))
        # Matches the text of any special token, the longest first.
        self.special_pattern = re.compile("|".join(re.escape(text) for text in contents) or r"(?!)")
        self.special_characters_max = max(map(len, contents), default=0)
        # Every proper prefix of a special token's text, and every proper suffix.
        heads = dict.fromkeys(text[:i] for text in contents for i in range(1, len(text)))
        tails = dict.fromkeys(text[i:] for text in contents for i in range(1, len(text)))
        self.special_ends = (tuple(heads), tuple(tails))

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.token_bytes)

    def encode(self, text: str, *, parse_special: bool, add_special: bool = False) -> tuple[int, ...]:
        """Ids of `text`. `add_special` adds the model's own begin token, if it wants one. May be empty: some bytes have no token."""
        encoder = self._special if parse_special else self._plain
        # The batch call: the only one that lets go of the interpreter lock while it works.
        return tuple(encoder.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)

    def encode_guarded(self, text: str, guard: str) -> tuple[int, ...]:
        """Ids of a rendered template in which `guard`, one character, marks places where no special token may begin or go on.

        Equal to encode(parse_special=True) when no guard is in the text.
        """
        if guard not in text:
            return self.encode(text, parse_special=True)
        ids: list[int] = []
        start = 0
        for match in self.special_pattern.finditer(text):
            ids += self.encode(text[start : match.start()].replace(guard, ""), parse_special=False)
            special = self._special.token_to_id(match.group())
            assert special is not None, "a special token without an id"
            ids.append(special)
            start = match.end()
        ids += self.encode(text[start:].replace(guard, ""), parse_special=False)
        return tuple(ids)

    def tokens_at_least(self, text: str, enough: int) -> int:
        """A cheap lower bound of the number of tokens: bytes that have tokens ÷ the longest token's bytes, or the words.

        The words are only counted where the bytes do not make `enough`: a long text is judged at a glance.
        """
        if self._shrink == 0:
            return 0
        data = text.encode()
        if self.vocabulary.lost_bytes:
            data = data.translate(None, self.vocabulary.lost_bytes)
        least = len(data) // (self._longest_token_bytes * self._shrink)
        return max(least, len(data.split())) if least < enough and self.vocabulary.words_apart else least

    def table(self, *, skip_special: bool) -> tuple[bytes, ...]:
        """Bytes of each id as they appear in a text."""
        return self._shown if skip_special else self.vocabulary.token_bytes

    def json_texts(self, *, skip_special: bool) -> JsonTexts:
        """The same as JSON strings."""
        return self._json_texts[skip_special]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text that `ids` stand for, from its beginning. Ids must be below vocab_size."""
        table = self.table(skip_special=skip_special)
        text = b"".join([table[i] for i in ids]).decode("utf-8", "replace")
        return text[1:] if self.vocabulary.strip_first_space and text.startswith(" ") else text
