"""Tokens as JSON strings: what a token reads as, is the same in every answer, so it is decoded and escaped once."""

from __future__ import annotations

from collections.abc import Sequence

import orjson


class JsonTexts(dict[int, bytes]):
    """By id, made when it is first asked for; as many as the vocabulary at most. Raises IndexError for an id outside it.

    b"" for a token without text, and for one that is no text by itself: part of a character.
    """

    def __init__(self, table: Sequence[bytes]) -> None:
        """`table`: bytes of each id."""
        super().__init__()
        self._table = table

    def __missing__(self, token_id: int) -> bytes:
        try:
            text = self._table[token_id].decode()
        except UnicodeDecodeError:
            text = ""
        made = self[token_id] = orjson.dumps(text) if text else b""
        return made
