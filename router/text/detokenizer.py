"""Token ids to text, a few at a time: O(1) per token, and never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from router.text.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One choice's text. What push and flush return, concatenated, is the decoding of all ids whatever the pieces were.

    Bytes of an unfinished character are held until it is complete or cannot become one (then it reads as U+FFFD).
    """

    __slots__ = ("_decoder", "_table", "holds")

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._table = tokenizer.table(skip_special=skip_special)
        self._decoder = _Utf8("replace")
        self.holds = False  # an unfinished character: until then, a token reads as it does alone

    def push(self, ids: Sequence[int]) -> str:
        """Text that the next ids complete."""
        table = self._table
        data = table[ids[0]] if len(ids) == 1 else b"".join([table[i] for i in ids])
        if not self.holds:
            try:
                return data.decode()  # mostly whole characters: several times as fast
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self.holds = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """What was held at the end of the text: one U+FFFD, or nothing."""
        self.holds = False
        return self._decoder.decode(b"", final=True)
