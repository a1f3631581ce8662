"""What rank 0 has told the others of the pages of the last step's rows, and what is new in this one's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import is_, ne

import msgspec

from replica.step import Row

Lacking = tuple[list[int], Sequence[int]]  # what the others know of a row's pages, and the request's list, which is to have one more


class PageNews(msgspec.Struct, frozen=True, gc=False):
    """Row r begins with the first `kept[r]` pages of row `places[r]` of the step before; `pages` are what follows, row after row.

    A place beyond the step before: the row was not there. `carried` is (*places, *kept); None: each row goes on from its own place with
    all that it had.
    """

    carried: list[int] | None
    pages: list[int]


class ToldPages:
    """Keeps lists of its own: a request's list grows between steps. One that is still the same is not read again (replica.step.Row)."""

    def __init__(self) -> None:
        self._rows: Sequence[Row] = ()
        self._lists: list[Sequence[int]] = []
        self._pages: list[list[int]] = []
        self._sizes: list[int] = []  # of both

    def tell(self, rows: Sequence[Row], counts: list[int]) -> PageNews:
        """`counts`: how many pages of each row the others must know. Raises ValueError for a row that has fewer."""
        blocks = [row.blocks for row in rows]
        pages = self._gains(blocks, counts)
        news = self._moves(rows, blocks, counts) if pages is None else PageNews(None, pages)
        self._rows, self._lists, self._sizes = rows, blocks, counts
        return news

    def ahead(self, counts: list[int]) -> tuple[list[Sequence[int]], list[Lacking]]:
        """The lists of all rows; and of those for which `counts` is one page more than told: what was told, and the list."""
        lists = self._lists
        return lists, [(known, now) for known, now, count in zip(self._pages, lists, counts, strict=True) if count > len(known)]

    def gain(self, rows: Sequence[Row], counts: list[int], lacking: list[Lacking], pages: list[int]) -> None:
        """The rows have come `ahead`, and the others have been told these pages: one for each that was lacking."""
        for (known, _), page in zip(lacking, pages, strict=True):
            known.append(page)
        self._rows, self._sizes = rows, counts

    def _gains(self, blocks: list[Sequence[int]], counts: list[int]) -> list[int] | None:
        """The new pages of rows that each have what they had, and all that they need. None for all else, and nothing is told."""
        sizes = list(map(len, blocks))
        if sizes != counts or len(sizes) != len(self._sizes):
            return None
        same_lists = all(map(is_, blocks, self._lists))
        differs = map(ne, sizes, self._sizes) if same_lists else map(ne, self._pages, blocks)
        changed = [(self._pages[place], blocks[place]) for place in compress(range(len(sizes)), differs)]
        if not all(_begins(now, known, same_lists) for known, now in changed):
            return None
        pages: list[int] = []
        for known, now in changed:
            new = now[len(known) :]
            known += new
            pages += new
        return pages

    def _moves(self, rows: Sequence[Row], blocks: list[Sequence[int]], counts: list[int]) -> PageNews:
        before, nowhere = {row.request: place for place, row in enumerate(self._rows)}, len(self._rows)
        places = [before.get(row.request, nowhere) for row in rows]
        told = [self._pages[place] if place < nowhere else [] for place in places]
        kept: list[int] = []
        pages: list[int] = []
        for row, place, known, now, count in zip(rows, places, told, blocks, counts, strict=True):
            if count > len(now):
                raise ValueError(f"row of request {row.request} needs {count} pages and has {len(now)}")
            keep = min(len(known), count)
            if keep and (now is not self._lists[place] or now[keep - 1] != known[keep - 1]):
                keep = _common(known, now, keep)
            if keep < count or keep < len(known):
                new = now[keep:count]
                known[keep:] = new
                pages += new
            kept.append(keep)
        stayed = kept == self._sizes and places == list(range(nowhere))
        self._pages = told
        return PageNews(None if stayed else places + kept, pages)


def _begins(now: Sequence[int], known: list[int], same_list: bool) -> bool:
    """Whether `now` begins with `known`. Of a list that is still the same the last page tells."""
    size = len(known)
    if same_list and size:
        return len(now) >= size and now[size - 1] == known[-1]
    return now[:size] == known


def _common(before: Sequence[int], now: Sequence[int], length: int) -> int:
    """Of the first `length` how many are the same in both. Nearly always all: that is tried first."""
    if before[:length] == now[:length]:
        return length
    return next(index for index in range(length) if before[index] != now[index])
