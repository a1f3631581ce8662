"""A Step as bytes, for the ranks that do not sample: which tokens at which positions over which pages, and what to copy.

Both ends keep the page lists of the previous step's rows; a row that was in it is sent as the pages it gained (a decoding
row: about 20 bytes, whatever its context). A row that was not is sent whole, so nothing is remembered beyond one step.

    header   little-endian: magic u16 · version u8 · kind u8 · step_id u64 · number of rows u32 · of copies u32 ·
             crc32 of all the rest u32
    row      request u64 · start u32 · tokens u32 · flags u8 (1 draws, 2 is scored) · pages kept u32 · pages new u32,
             then tokens, new pages, and, if scored, score_from as u32 each
    copy     source u32 · target u32
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Sequence

from replica.contract.messages import SamplingParams
from replica.step import BlockCopy, Draw, Row, Step

MAGIC = 0x524E
VERSION = 1
_HEADER = struct.Struct("<HBBQII")
_CRC = struct.Struct("<I")
_ROW = struct.Struct("<QIIBII")
_COPY = struct.Struct("<II")
_U32 = struct.Struct("<I")
_STEP, _STOP = 0, 1
_DRAWS, _SCORED = 1, 2
HEADER_BYTES = _HEADER.size + _CRC.size

# Stands for every Draw on ranks that do not sample: its row needs logits, nobody reads the rest.
PLACEHOLDER_DRAW = Draw(SamplingParams(seed=0, max_tokens=1, temperature=0.0), 0, (), ())


class CodecError(Exception):
    """The bytes are not the next Step of ours: the ranks are out of step, nothing may be computed."""


class StepEncoder:
    """Rank 0's end."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pages: dict[int, Sequence[int]] = {}

    def encode(self, step: Step) -> bytes:
        parts: list[bytes] = []
        pages: dict[int, Sequence[int]] = {}
        for row in step.rows:
            count = -(-(row.start + len(row.tokens)) // self._block_size)
            if count > len(row.blocks):
                raise ValueError(f"row of request {row.request} needs {count} pages and has {len(row.blocks)}")
            needed = row.blocks[:count]
            kept = _common(self._pages.get(row.request, ()), needed)
            pages[row.request] = needed
            flags = (_DRAWS if row.draw is not None else 0) | (_SCORED if row.score_from is not None else 0)
            parts.append(_ROW.pack(row.request, row.start, len(row.tokens), flags, kept, count - kept))
            parts.append(_u32s(row.tokens))
            parts.append(_u32s(needed[kept:]))
            if row.score_from is not None:
                parts.append(_U32.pack(row.score_from))
        parts.extend(_COPY.pack(copy.source, copy.target) for copy in step.copies)
        self._pages = pages
        return _seal(_HEADER.pack(MAGIC, VERSION, _STEP, step.step_id, len(step.rows), len(step.copies)), b"".join(parts))


def encode_stop() -> bytes:
    """Tells the other ranks to leave."""
    return _seal(_HEADER.pack(MAGIC, VERSION, _STOP, 0, 0, 0), b"")


class StepDecoder:
    """Another rank's end."""

    def __init__(self) -> None:
        self._pages: dict[int, Sequence[int]] = {}

    def decode(self, data: bytes) -> Step | None:
        """None: stop. Raises CodecError."""
        try:
            return self._decode(data)
        except struct.error as error:
            raise CodecError(f"a Step of {len(data)} bytes is cut short: {error}") from error

    def _decode(self, data: bytes) -> Step | None:
        magic, version, kind, step_id, rows, copies = _HEADER.unpack_from(data)
        (checksum,) = _CRC.unpack_from(data, _HEADER.size)
        if magic != MAGIC or version != VERSION:
            raise CodecError(f"not a Step of version {VERSION}: magic {magic:#x}, version {version}")
        if _crc(data[: _HEADER.size], data[HEADER_BYTES:]) != checksum:
            raise CodecError(f"the checksum of step {step_id} is wrong")
        if kind == _STOP:
            return None
        pages: dict[int, Sequence[int]] = {}
        offset = HEADER_BYTES
        decoded: list[Row] = []
        for _ in range(rows):
            row, offset = self._row(data, offset)
            pages[row.request] = row.blocks
            decoded.append(row)
        moves = tuple(BlockCopy(*_COPY.unpack_from(data, offset + index * _COPY.size)) for index in range(copies))
        if offset + copies * _COPY.size != len(data):
            raise CodecError(f"step {step_id} has {len(data)} bytes, {offset + copies * _COPY.size} were expected")
        self._pages = pages
        return Step(step_id, tuple(decoded), moves)

    def _row(self, data: bytes, offset: int) -> tuple[Row, int]:
        request, start, tokens, flags, kept, new = _ROW.unpack_from(data, offset)
        offset += _ROW.size
        known = self._pages.get(request, ())
        if kept > len(known):
            raise CodecError(f"request {request} keeps {kept} pages of {len(known)}")
        ids = struct.unpack_from(f"<{tokens}I", data, offset)
        offset += 4 * tokens
        blocks = [*known[:kept], *struct.unpack_from(f"<{new}I", data, offset)]
        offset += 4 * new
        score_from: int | None = None
        if flags & _SCORED:
            (score_from,) = _U32.unpack_from(data, offset)
            offset += 4
        draw = PLACEHOLDER_DRAW if flags & _DRAWS else None
        return Row(request, ids, start, blocks, draw, score_from), offset


def _seal(header: bytes, body: bytes) -> bytes:
    return header + _CRC.pack(_crc(header, body)) + body


def _crc(header: bytes, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(header))


def _common(before: Sequence[int], now: Sequence[int]) -> int:
    """Length of the common prefix. Nearly always all of `before`: that is tried first."""
    length = min(len(before), len(now))
    if before[:length] == now[:length]:
        return length
    for index in range(length):
        if before[index] != now[index]:
            return index
    return length


def _u32s(values: Sequence[int]) -> bytes:
    packed = array("I", values)
    if packed.itemsize != 4:
        return struct.pack(f"<{len(values)}I", *values)
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


_BIG_ENDIAN = struct.pack("=H", 1) == struct.pack(">H", 1)
