"""A Step as bytes, for the ranks that do not sample: which tokens at which positions over which pages, and what to copy.

Both ends keep the page lists of the previous step's rows; a row that was in it is sent as the pages it gained (a decoding
row: about 30 bytes, whatever its context). A row that was not is sent whole, so nothing is remembered beyond one step.
Columns, not rows: each is packed and unpacked in one call.

    header    little-endian: magic u16 · version u8 · kind u8 · step_id u64 · number of rows R u32 · of tokens T u32 ·
              of new pages P u32 · of scored rows S u32 · of copies C u32 · crc32 of all the rest u32
    rows      request u64 × R · start u32 × R · tokens u32 × R · pages kept u32 × R · pages new u32 × R ·
              flags u8 × R (1 draws, 2 is scored)
    contents  token u32 × T · page u32 × P · score_from u32 × S · (source, target) u32 × 2 C
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from itertools import chain, islice

from replica.contract.messages import SamplingParams
from replica.step import BlockCopy, Draw, Row, Step

MAGIC = 0x524E
VERSION = 2
_HEADER = struct.Struct("<HBBQIIIII")
_CRC = struct.Struct("<I")
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
        self._told: dict[int, list[int]] = {}  # request → the pages of it that the others know

    def encode(self, step: Step) -> bytes:
        """Raises ValueError for a row with fewer pages than its positions need."""
        told, now, size = self._told, dict[int, list[int]](), self._block_size
        kept: list[int] = []
        new: list[int] = []
        pages: list[int] = []
        for row in step.rows:
            blocks = row.blocks
            count = (row.start + len(row.tokens) + size - 1) // size
            if count > len(blocks):
                raise ValueError(f"row of request {row.request} needs {count} pages and has {len(blocks)}")
            known = told.get(row.request, [])
            if len(blocks) == count and known == blocks:  # most of a decode's steps; no list is copied
                keep = count
            else:
                keep = _common(known, blocks, count)
                del known[keep:]
                known += blocks[keep:count]
                pages += blocks[keep:count]
            now[row.request] = known
            kept.append(keep)
            new.append(count - keep)
        self._told = now
        rows = step.rows
        tokens = list(chain.from_iterable([row.tokens for row in rows]))
        scored = [row.score_from for row in rows if row.score_from is not None]
        ends = [end for copy in step.copies for end in (copy.source, copy.target)]
        flags = bytes([(row.draw is not None) + 2 * (row.score_from is not None) for row in rows])
        columns = [*[row.start for row in rows], *[len(row.tokens) for row in rows], *kept, *new]
        contents = [*tokens, *pages, *scored, *ends]
        body = b"".join((_packed("Q", [row.request for row in rows]), _packed("I", columns), flags, _packed("I", contents)))
        return _seal(
            _HEADER.pack(MAGIC, VERSION, _STEP, step.step_id, len(rows), len(tokens), len(pages), len(scored), len(ends) // 2), body
        )


def encode_stop() -> bytes:
    """Tells the other ranks to leave."""
    return _seal(_HEADER.pack(MAGIC, VERSION, _STOP, 0, 0, 0, 0, 0, 0), b"")


class StepDecoder:
    """Another rank's end."""

    def __init__(self) -> None:
        self._pages: dict[int, list[int]] = {}

    def decode(self, data: bytes) -> Step | None:
        """None: stop. Raises CodecError. The rows' page lists are valid until the next call, which lets them grow."""
        try:
            magic, version, kind, step_id, *counts = _HEADER.unpack_from(data)
            (checksum,) = _CRC.unpack_from(data, _HEADER.size)
        except struct.error as error:
            raise CodecError(f"a Step of {len(data)} bytes is cut short: {error}") from error
        if magic != MAGIC or version != VERSION:
            raise CodecError(f"not a Step of version {VERSION}: magic {magic:#x}, version {version}")
        if _crc(data[: _HEADER.size], data[HEADER_BYTES:]) != checksum:
            raise CodecError(f"the checksum of step {step_id} is wrong")
        if kind == _STOP:
            return None
        return self._decode(data, step_id, counts)

    def _decode(self, data: bytes, step_id: int, counts: Sequence[int]) -> Step:
        rows, num_tokens, num_pages, num_scored, copies = counts
        words = num_tokens + num_pages + num_scored + 2 * copies
        expected = HEADER_BYTES + rows * (8 + 4 * 4 + 1) + 4 * words
        if len(data) != expected:
            raise CodecError(f"step {step_id} has {len(data)} bytes, {expected} were expected")
        columns = HEADER_BYTES + 8 * rows
        contents = columns + 17 * rows
        requests = _unpacked("Q", data[HEADER_BYTES:columns])
        values = _unpacked("I", data[columns : contents - rows])
        starts, lengths, kept, new = (values[i * rows : (i + 1) * rows] for i in range(4))
        flags = data[contents - rows : contents]
        rest = iter(_unpacked("I", data[contents:]))
        if sum(lengths) != num_tokens or sum(new) != num_pages or sum(flag & _SCORED for flag in flags) != _SCORED * num_scored:
            raise CodecError(f"the columns of step {step_id} contradict each other")
        if num_tokens == rows and max(lengths, default=1) == 1:  # as in most steps: each decodes
            tokens: list[tuple[int, ...]] = list(zip(islice(rest, rows), strict=False))
        else:
            tokens = [tuple(islice(rest, length)) for length in lengths]
        before, now = self._pages, dict[int, list[int]]()
        for request, keep, gained in zip(requests, kept, new, strict=True):
            pages = before.get(request, [])
            if keep != len(pages):
                if keep > len(pages):
                    raise CodecError(f"request {request} keeps {keep} pages of {len(pages)}")
                pages = pages[:keep]
            if gained:
                pages.extend(islice(rest, gained))
            now[request] = pages
        self._pages = now
        score_from = [next(rest) if flag & _SCORED else None for flag in flags]
        decoded = tuple(
            Row(request, ids, start, now[request], PLACEHOLDER_DRAW if flag & _DRAWS else None, scored)
            for request, ids, start, flag, scored in zip(requests, tokens, starts, flags, score_from, strict=True)
        )
        return Step(step_id, decoded, tuple(BlockCopy(next(rest), next(rest)) for _ in range(copies)))


def _packed(kind: str, values: list[int]) -> bytes:
    """Little-endian, four bytes each ("I") or eight ("Q")."""
    packed = array(kind, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpacked(kind: str, data: bytes) -> list[int]:
    unpacked = array(kind)
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()


def _seal(header: bytes, body: bytes) -> bytes:
    return header + _CRC.pack(_crc(header, body)) + body


def _crc(header: bytes, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(header))


def _common(before: Sequence[int], now: Sequence[int], count: int) -> int:
    """Length of the common prefix of `before` and now[:count]. Nearly always all of `before`: that is tried first."""
    length = min(len(before), count)
    if before[:length] == now[:length]:
        return length
    return next(index for index in range(length) if before[index] != now[index])
