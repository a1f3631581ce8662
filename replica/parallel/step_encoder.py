"""Rank 0's end of the Steps: each as bytes, in the order in which the other ranks decode them."""

from __future__ import annotations

from itertools import chain
from operator import add

from replica.parallel.step_codec import DECODES, DRAWS, EXPECTED, NUMBER_MASK, SAME_ROWS, SCORED, Header, seal
from replica.parallel.told_pages import ToldPages
from replica.step import Row, Step


class StepEncoder:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._told = ToldPages()
        self._number = 0  # of the next Step in its sequence
        self._ends: list[int] = []  # positions that the rows of the last step have come to
        self._counts: list[int] = []  # pages that these rows need to decode on; empty until prepared

    def prepare(self) -> None:
        """Have ready what a decode that goes on is compared with: for when there is time, before that Step comes."""
        size = self._block_size
        self._counts = [end // size + 1 for end in self._ends]

    def encode(self, step: Step) -> bytes:
        """Raises ValueError for a row with fewer pages than its positions need."""
        rows = step.rows
        starts = [row.start for row in rows]
        words = self._going_on(rows, starts) if starts == self._ends and starts else None
        if words is None:
            form, flat, pages, scored, columns = self._whole(rows, starts)
        else:
            (form, scored, columns), (flat, pages) = (EXPECTED, [], []), words
        copies = [page for copy in step.copies for page in (copy.source, copy.target)]
        sizes = (len(rows), len(flat), len(pages), len(scored), len(copies) // 2)
        header = Header(form, step.step_id, self._number & NUMBER_MASK, *sizes)
        self._number += 1
        return seal(header, [*columns, *flat, *pages, *scored, *copies])

    def _going_on(self, rows: tuple[Row, ...], starts: list[int]) -> tuple[list[int], list[int]] | None:
        """Tokens and new pages of a step whose rows all decode on from the last one's; None for any other step."""
        flat = _one_token_each(rows)
        if flat is None:
            return None
        if not self._counts:
            self.prepare()
        pages = self._told.gains(rows, self._counts)
        if pages is None:
            return None
        self._ends, self._counts = [start + 1 for start in starts], []
        return flat, pages

    def _whole(self, rows: tuple[Row, ...], starts: list[int]) -> tuple[int, list[int], list[int], list[int], list[int]]:
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
        self._ends, self._counts = ends, []
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
