"""A Step as bytes, for the ranks that do not sample: which tokens at which positions over which pages, and what to copy.

Both ends keep places, positions and pages of the previous step's rows; a row that was in it is sent as the pages it gained, a row that was
not is sent whole, so of earlier steps nothing but their number is remembered. Columns, not rows: each is packed and unpacked in one call,
and what the step would only repeat is left out. A decoding row takes 4 bytes in a decode that goes on; 16 where rows have come, left or
changed places, or beside a chunk of a prompt; 24 where both are so; and 4 with each new page, whatever its context.

    header    little-endian: magic u16 · version u8 · form u8 · step_id u64 · number of the Step in its sequence u32 · rows R u32 ·
              tokens T u32 · new pages P u32 · scored rows S u32 · copies C u32 · crc32 of all the rest u32
    form      1 stop: no Step follows · 2 the rows are those of the Step before, in order, and keep their pages ·
              4 every row has one token, draws, and is not scored · 8 (alone) both, and each goes on where the Step before ended
    body      u32: place in the Step before × R (as many as it had rows: not there) · pages kept × R (both unless form 2 or 8) ·
              tokens × R · flags × R (both unless form 4 or 8; 1 draws, 2 is scored) · start × R (unless form 8) · token × T · page × P ·
              score_from × S · (source, target) × C; a row's new pages are as many as its positions need beyond those it keeps
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Iterable

import msgspec

MAGIC = 0x524E
VERSION = 3
STOP, SAME_ROWS, DECODES, EXPECTED = 1, 2, 4, 8
DRAWS, SCORED = 1, 2
_HEADER = struct.Struct("<HBBQIIIIII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size
NUMBER_MASK = 0xFFFFFFFF  # a sequence may be longer than a u32


class CodecError(Exception):
    """The bytes are not the next Step of ours: the ranks are out of step, nothing may be computed."""


class Header(msgspec.Struct, frozen=True, gc=False):
    """What every Step begins with; counts are of its rows, tokens, new pages, scored rows and copies."""

    form: int
    step_id: int
    number: int
    rows: int
    tokens: int
    pages: int
    scored: int
    copies: int

    @property
    def words(self) -> int:
        """How many u32 follow."""
        columns = 1 + 2 * (not self.form & SAME_ROWS) + 2 * (not self.form & DECODES) if self.form != EXPECTED else 0
        return columns * self.rows + self.tokens + self.pages + self.scored + 2 * self.copies


class Cover:
    """What comes before the body of a Step, made once its counts are known: the header, and the checksum as far as it goes."""

    __slots__ = ("_checksum", "head", "words")

    def __init__(self, header: Header) -> None:
        counts = (header.step_id, header.number, header.rows, header.tokens, header.pages, header.scored, header.copies)
        self.head = _HEADER.pack(MAGIC, VERSION, header.form, *counts)
        self.words = header.words  # that follow
        self._checksum = zlib.crc32(self.head)

    def seal(self, words: Iterable[int]) -> bytes:
        """Raises OverflowError for what no u32 holds."""
        body = array("I", words)
        if sys.byteorder == "big":
            body.byteswap()
        return b"".join((self.head, _CRC.pack(zlib.crc32(body, self._checksum)), body))

    def fits(self, data: bytes) -> bool:
        """Whether `data` is a whole Step under this very header."""
        if not data.startswith(self.head) or len(data) != HEADER_BYTES + 4 * self.words:
            return False
        return zlib.crc32(memoryview(data)[HEADER_BYTES:], self._checksum) == int.from_bytes(data[_HEADER.size : HEADER_BYTES], "little")


def seal(header: Header, words: Iterable[int]) -> bytes:
    """Raises OverflowError for what no u32 holds."""
    return Cover(header).seal(words)


def unseal(data: bytes) -> Header:
    """The header of what has the right form, length and checksum. Raises CodecError."""
    try:
        magic, version, form, *counts = _HEADER.unpack_from(data)
        (checksum,) = _CRC.unpack_from(data, _HEADER.size)
    except struct.error as error:
        raise CodecError(f"a Step of {len(data)} bytes is cut short: {error}") from error
    if magic != MAGIC or version != VERSION:
        raise CodecError(f"not a Step of version {VERSION}: magic {magic:#x}, version {version}")
    header = Header(form, *counts)
    view = memoryview(data)
    if zlib.crc32(view[HEADER_BYTES:], zlib.crc32(view[: _HEADER.size])) != checksum:
        raise CodecError(f"the checksum of step {header.step_id} is wrong")
    expected = HEADER_BYTES + 4 * header.words
    if len(data) != expected:
        raise CodecError(f"step {header.step_id} has {len(data)} bytes, {expected} were expected")
    return header


def encode_stop() -> bytes:
    """Tells the other ranks to leave."""
    return seal(Header(STOP, 0, 0, 0, 0, 0, 0, 0), ())
