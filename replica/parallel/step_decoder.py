"""Another rank's end of the Steps: bytes as the arrays that its runner computes with. No object is made for a row."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kernels.batch import Int32, PagedBatch
from replica.parallel.page_tables import PageTables, Places, Words
from replica.parallel.step_codec import (
    DECODES,
    DRAWS,
    EXPECTED,
    HEADER_BYTES,
    NUMBER_MASK,
    SAME_ROWS,
    SCORED,
    STOP,
    CodecError,
    Cover,
    Header,
    unseal,
)
from replica.rank_step import RankStep
from replica.step_inputs import StepInputs, pack_inputs

_WORD = np.dtype("<u4")
_LITTLE_ENDIAN = sys.byteorder == "little"  # words are read where they lie
_LOW_HALF = 0 if _LITTLE_ENDIAN else 1


class _Columns:
    """The body of a Step, read from its beginning."""

    def __init__(self, data: bytes) -> None:
        self._words: Words = np.frombuffer(data, _WORD, offset=HEADER_BYTES)
        self._at = 0

    def take(self, count: int) -> Words:
        begin, self._at = self._at, self._at + count
        return self._words[begin : self._at]

    def copies(self, count: int) -> tuple[tuple[int, int], ...]:
        if not count:
            return ()
        pages = self.take(2 * count).tolist()
        return tuple(zip(pages[::2], pages[1::2], strict=True))


@dataclass(frozen=True, slots=True)
class _Expected:
    """The next Step of a decode, but for its tokens and for the pages that rows[i] lack at columns[i] of the table."""

    step: RankStep
    inputs: StepInputs
    pages: Int32  # [R] how many each row has
    rows: Places
    columns: Places
    cover: Cover
    blanks: _Blanks


class _Blanks:
    """What an expected Step leaves open, as memory: for a rank that has just woken up numpy's own ways take twice as long."""

    __slots__ = ("_pages", "_places", "_rows", "_tokens")

    def __init__(self, inputs: StepInputs, places: Places) -> None:
        """`places`: of the pages that lack, in the flat table."""
        self._rows = inputs.token_ids.size
        self._tokens = inputs.token_ids.view(np.uint32)[_LOW_HALF::2].data  # the high halves are 0
        self._pages = inputs.batch.tables.reshape(-1).view(np.uint32).data
        self._places: list[int] = places.tolist()

    def fill(self, words: memoryview) -> None:
        """Tokens, then pages; u32 of this machine."""
        self._tokens[:] = words[: self._rows]
        for place, page in zip(self._places, words[self._rows :], strict=True):
            self._pages[place] = page


class StepDecoder:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._number = 0
        self._step_id = 0  # of the last one
        self._tables = PageTables()
        self._last: PagedBatch | None = None
        self._expected: _Expected | None = None
        self._gained: _Expected | None = None  # the last step, of whose pages the tables are yet to learn

    def prepare(self) -> None:
        """Have ready what the next Step of a decode will bring, but for tokens: for when there is time, before that Step comes."""
        if self._last is None or self._expected is not None:
            return
        self._learn()
        starts = self._last.starts + self._last.counts
        pages = starts // self._block_size + 1
        table, rows, columns = self._tables.ahead(pages)
        asked = _all_draw(starts.size)
        inputs = pack_inputs(np.zeros(starts.size, np.int64), PagedBatch(starts, asked.counts, table), asked.drawing, ())
        step_id = self._step_id + 1
        cover = Cover(Header(EXPECTED, step_id, self._number & NUMBER_MASK, starts.size, starts.size, rows.size, 0, 0))
        blanks = _Blanks(inputs, rows * table.shape[1] + columns)
        self._expected = _Expected(RankStep(step_id, inputs), inputs, pages, rows, columns, cover, blanks)

    def decode(self, data: bytes) -> RankStep | None:
        """None: stop. Raises CodecError."""
        expected = self._expected
        if expected is not None and _LITTLE_ENDIAN and expected.cover.fits(data):
            return self._go_on(expected, memoryview(data)[HEADER_BYTES:].cast("I"))
        header = unseal(data)
        if header.form == STOP:
            return None
        if header.number != self._number & NUMBER_MASK:
            raise CodecError(f"step {header.step_id} is number {header.number} of its sequence, {self._number & NUMBER_MASK} was expected")
        self._number += 1
        try:
            return self._decode(header, _Columns(data))
        except CodecError as error:
            raise CodecError(f"step {header.step_id}: {error}") from None

    def _go_on(self, expected: _Expected, words: memoryview) -> RankStep:
        """Exactly the Step that was prepared has come."""
        expected.blanks.fill(words)
        self._number += 1
        self._step_id += 1
        self._expected, self._last, self._gained = None, expected.inputs.batch, expected
        return expected.step

    def _decode(self, header: Header, columns: _Columns) -> RankStep:
        if header.form == EXPECTED:
            self.prepare()
        expected, self._expected = self._expected, None
        self._learn()
        step = self._whole(header, columns) if header.form != EXPECTED else self._as_expected(header, columns, expected)
        self._last, self._step_id = None if step.inputs is None else step.inputs.batch, step.step_id
        return step

    def _as_expected(self, header: Header, columns: _Columns, expected: _Expected | None) -> RankStep:
        if expected is None or not header.rows == header.tokens == expected.pages.size or header.scored:
            raise CodecError(f"it does not go on from the step before, with {header.rows} rows and {header.tokens} tokens")
        if header.pages != expected.rows.size:
            raise CodecError(f"rows need {expected.rows.size} pages more, and {header.pages} are there")
        expected.blanks.fill(columns.take(header.tokens + header.pages).astype(np.uint32).data)
        self._gained = expected
        return RankStep(header.step_id, expected.inputs, columns.copies(header.copies))

    def _learn(self) -> None:
        if self._gained is not None:
            expected, self._gained = self._gained, None
            self._tables.gain(expected.pages, expected.rows, expected.columns, expected.inputs.batch.tables)

    def _whole(self, header: Header, columns: _Columns) -> RankStep:
        rows, form = header.rows, header.form
        if form & ~(SAME_ROWS | DECODES):
            raise CodecError(f"form {form} is unknown")
        carried = None if form & SAME_ROWS else (columns.take(rows), columns.take(rows))
        asked = _one_token_each(header) if form & DECODES else _asked(header, columns.take(rows), columns.take(rows))
        starts = columns.take(rows).astype(np.int32)
        token_ids, new = columns.take(header.tokens).astype(np.int64), columns.take(header.pages)
        score_from, copies = columns.take(header.scored).tolist(), columns.copies(header.copies)
        pages = (starts if form & DECODES else starts + (asked.counts - 1)) // self._block_size + 1
        if carried is None:
            self._tables.go_on(pages, new)
        else:
            self._tables.replace(*carried, pages, new)
        if not rows:
            return RankStep(header.step_id, None, copies)
        batch = PagedBatch(starts, asked.counts, self._tables.table())
        inputs = pack_inputs(token_ids, batch, asked.drawing, asked.quiet)
        return RankStep(header.step_id, inputs, copies, tuple(zip(asked.scored, score_from, strict=True)))


@dataclass(frozen=True, slots=True)
class _Asked:
    """Of the rows: how many tokens each has, and which of them draw, which do not, which are scored."""

    counts: Int32
    drawing: tuple[int, ...]
    quiet: tuple[int, ...] = ()
    scored: tuple[int, ...] = ()


@lru_cache(maxsize=256)
def _all_draw(rows: int) -> _Asked:
    counts = np.ones(rows, np.int32)
    counts.flags.writeable = False
    return _Asked(counts, tuple(range(rows)))


def _one_token_each(header: Header) -> _Asked:
    if header.tokens != header.rows or header.scored:
        raise CodecError(f"{header.rows} rows decode, with {header.tokens} tokens, of which {header.scored} are scored")
    return _all_draw(header.rows)


def _asked(header: Header, lengths: Words, flags: Words) -> _Asked:
    scored = np.flatnonzero(flags & SCORED)
    if int(lengths.sum()) != header.tokens or not lengths.all() or scored.size != header.scored or (flags > DRAWS + SCORED).any():
        raise CodecError("its columns contradict each other")
    drawing = np.flatnonzero(flags & DRAWS).tolist()
    quiet = np.flatnonzero((flags & DRAWS) == 0).tolist()
    return _Asked(lengths.astype(np.int32), tuple(drawing), tuple(quiet), tuple(scored.tolist()))
