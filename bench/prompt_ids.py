"""Token ids of a prompt from a key: the same key, the same ids, on every machine and in every version."""

from __future__ import annotations

import hashlib
from array import array

FIRST_PLAIN_ID = 1_000  # below lie special tokens and single bytes
LAST_PLAIN_ID = 30_000  # inside every vocabulary met so far
_RANGE = LAST_PLAIN_ID - FIRST_PLAIN_ID + 1


def segment_ids(key: str, tokens: int) -> array[int]:
    """`tokens` ids between FIRST_PLAIN_ID and LAST_PLAIN_ID; fewer of the same key are a prefix of more."""
    drawn = array("H", hashlib.shake_128(key.encode()).digest(2 * tokens))
    return array("H", [FIRST_PLAIN_ID + value % _RANGE for value in drawn])
