"""Rank 0's end of the Steps: each as bytes, in the order in which the other ranks decode them."""

from __future__ import annotations

from itertools import chain
from operator import add

from replica.parallel.step_codec import DECODES, DRAWS, EXPECTED, NUMBER_MASK, SAME_ROWS, SCORED, Header, seal
from replica.parallel.told_pages import ToldPages
from replica.step import Step


class StepEncoder:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._told = ToldPages()
        self._number = 0  # of the next Step in its sequence
        self._ends: list[int] = []  # positions that the rows of the last step have come to

    def encode(self, step: Step) -> bytes:
        """Raises ValueError for a row with fewer pages than its positions need."""
        rows, size = step.rows, self._block_size
        starts = [row.start for row in rows]
        tokens = [row.tokens for row in rows]
        lengths = list(map(len, tokens))
        if lengths.count(1) == len(rows) and not [row for row in rows if row.draw is None or row.score_from is not None]:
            form, shape, scored = DECODES, [], []
            flat = [first for (first,) in tokens]
            counts = [start // size + 1 for start in starts]
            ends = [start + 1 for start in starts]
        else:
            flags = [DRAWS * (row.draw is not None) + SCORED * (row.score_from is not None) for row in rows]
            form, shape = 0, lengths + flags
            scored = [row.score_from for row in rows if row.score_from is not None]
            flat = list(chain.from_iterable(tokens))
            ends = list(map(add, starts, lengths))
            counts = [(end + size - 1) // size for end in ends]
        news = self._told.tell(rows, counts)
        if news.carried is None:
            form |= SAME_ROWS
        columns = [*(news.carried or ()), *shape, *starts]
        if rows and form == SAME_ROWS | DECODES and starts == self._ends:
            form, columns = EXPECTED, []
        self._ends = ends
        copies = [page for copy in step.copies for page in (copy.source, copy.target)]
        sizes = (len(rows), len(flat), len(news.pages), len(scored), len(copies) // 2)
        header = Header(form, step.step_id, self._number & NUMBER_MASK, *sizes)
        self._number += 1
        return seal(header, [*columns, *flat, *news.pages, *scored, *copies])
