"""Rank 0's end of the Steps: each as bytes, in the order in which the other ranks decode them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import add

from replica.parallel.step_codec import DECODES, DRAWS, EXPECTED, NUMBER_MASK, SAME_ROWS, SCORED, Cover, Header, seal
from replica.parallel.told_pages import Lacking, ToldPages
from replica.step import Row, Step


@dataclass(frozen=True, slots=True)
class _Expected:
    """The next Step of a decode, as far as it is known before it comes: rows in the same order, each one token further."""

    step_id: int
    starts: list[int]
    counts: list[int]  # pages that the other ranks know of each row afterwards
    lists: list[Sequence[int]]  # of pages, the requests' own
    lacking: list[Lacking]
    cover: Cover

    def tokens(self, rows: tuple[Row, ...]) -> list[int] | None:
        """None: these are other rows, or not where they were expected."""
        if len(rows) != len(self.starts):
            return None
        try:
            tokens = [
                token
                for row, start, pages in zip(rows, self.starts, self.lists, strict=True)
                for (token,) in (row.tokens,)
                if row.start == start and row.blocks is pages and row.draw is not None and row.score_from is None
            ]
        except ValueError:  # another number of tokens
            return None
        return tokens if len(tokens) == len(rows) else None

    def pages(self) -> list[int] | None:
        """What the requests' lists have grown by; None where one has not, or has become another."""
        if not all(len(now) > len(known) and now[len(known) - 1] == known[-1] for known, now in self.lacking):
            return None
        return [now[len(known)] for known, now in self.lacking]


class StepEncoder:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._told = ToldPages()
        self._number = 0  # of the next Step in its sequence
        self._step_id = 0  # of the last one
        self._ends: list[int] = []  # positions that the rows of the last step have come to
        self._decodes = False  # whether these rows had a token each, drew, and were not scored
        self._expected: _Expected | None = None
        self._came: tuple[_Expected, tuple[Row, ...], list[int]] | None = None  # the last Step, where it was the expected one

    def prepare(self) -> None:
        """Have ready what the next Step of a decode is compared with: for when there is time, before that Step comes."""
        self._learn()
        if not self._decodes or self._expected is not None:
            return
        starts, rows, step_id = self._ends, len(self._ends), self._step_id + 1
        counts = [start // self._block_size + 1 for start in starts]
        lists, lacking = self._told.ahead(counts)
        header = Header(EXPECTED, step_id, self._number & NUMBER_MASK, rows, rows, len(lacking), 0, 0)
        self._expected = _Expected(step_id, starts, counts, lists, lacking, Cover(header))

    def encode(self, step: Step) -> bytes:
        """Raises ValueError for a row with fewer pages than its positions need."""
        expected, self._expected = self._expected, None
        data = None if expected is None else self._as_expected(step, expected)
        if data is None:
            data = self._whole(step)
        self._number += 1
        return data

    def _as_expected(self, step: Step, expected: _Expected) -> bytes | None:
        if step.step_id != expected.step_id or step.copies:
            return None
        tokens, pages = expected.tokens(step.rows), expected.pages()
        if tokens is None or pages is None:
            return None
        data = expected.cover.seal(tokens + pages)
        self._came = expected, step.rows, pages
        return data

    def _learn(self) -> None:
        if self._came is not None:
            (expected, rows, pages), self._came = self._came, None
            self._told.gain(rows, expected.counts, expected.lacking, pages)
            self._step_id = expected.step_id
            self._ends = [start + 1 for start in expected.starts]

    def _whole(self, step: Step) -> bytes:
        self._learn()
        rows = step.rows
        form, flat, pages, scored, columns = self._columns(rows, [row.start for row in rows])
        copies = [page for copy in step.copies for page in (copy.source, copy.target)]
        sizes = (len(rows), len(flat), len(pages), len(scored), len(copies) // 2)
        self._step_id = step.step_id
        return seal(Header(form, step.step_id, self._number & NUMBER_MASK, *sizes), [*columns, *flat, *pages, *scored, *copies])

    def _columns(self, rows: tuple[Row, ...], starts: list[int]) -> tuple[int, list[int], list[int], list[int], list[int]]:
        """Form, tokens, new pages, positions scored from, and the columns before them."""
        size = self._block_size
        flat = _one_token_each(rows)
        scored: list[int] = []
        shape: list[int] = []
        if flat is not None:
            form, ends = DECODES, [start + 1 for start in starts]
        else:
            lengths = [len(row.tokens) for row in rows]
            flags = [DRAWS * (row.draw is not None) + SCORED * (row.score_from is not None) for row in rows]
            form, shape = 0, lengths + flags
            scored = [row.score_from for row in rows if row.score_from is not None]
            flat = list(chain.from_iterable(row.tokens for row in rows))
            ends = list(map(add, starts, lengths))
        news = self._told.tell(rows, [(end + size - 1) // size for end in ends])
        if news.carried is None:
            form |= SAME_ROWS
        goes_on = rows and form == SAME_ROWS | DECODES and starts == self._ends
        self._ends, self._decodes = ends, bool(rows) and bool(form & DECODES)
        if goes_on:
            return EXPECTED, flat, news.pages, scored, []
        return form, flat, news.pages, scored, [*(news.carried or ()), *shape, *starts]


def _one_token_each(rows: tuple[Row, ...]) -> list[int] | None:
    """The tokens of rows that each have one, draw, and are not scored; None where one is otherwise."""
    try:
        flat = [token for row in rows for (token,) in (row.tokens,) if row.draw is not None and row.score_from is None]
    except ValueError:  # another number of tokens
        return None
    return flat if len(flat) == len(rows) else None
