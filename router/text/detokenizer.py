"""Token ids to text, a few at a time: O(1) per token, and never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from router.text.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One choice's text. What push and flush return, concatenated, is the decoding of all ids whatever the pieces were.

    Bytes of an unfinished character are held until it is complete or cannot become one (then it reads as U+FFFD).
    """

    __slots__ = ("_decoder", "_table")

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._table = tokenizer.table(skip_special=skip_special)
        self._decoder = _Utf8("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that the next ids complete."""
        table = self._table
        return self._decoder.decode(b"".join([table[i] for i in ids]))

    def flush(self) -> str:
        """What was held at the end of the text: one U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)
