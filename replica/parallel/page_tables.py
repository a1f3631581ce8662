"""Another rank's memory of the last step: which pages its rows had. Nothing of requests, nothing of earlier steps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.batch import Int32
from replica.parallel.step_codec import CodecError

Words = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]
_WIDTH_MULTIPLE = 64


class PageTables:
    """A table as PagedBatch wants it, for each step made of the one before. Behind a row's pages it repeats the row's first."""

    def __init__(self) -> None:
        self._table = np.zeros((0, _WIDTH_MULTIPLE), np.int32)
        self._pages = np.zeros(0, np.int32)  # how many of each row are its own

    def table(self) -> Int32:
        """[R, most pages of a row], a copy. There is a row."""
        return self._table[:, : int(self._pages.max())].copy()

    def ahead(self, pages: Int32) -> tuple[Int32, Places, Places]:
        """The table of a next step whose rows go on with pages[r], one more than now at most: and where in it pages are missing."""
        rows = (pages - self._pages).nonzero()[0]
        self._widen(int(pages.max()))
        return self._table[:, : int(pages.max())].copy(), rows, self._pages[rows].astype(np.int64)

    def gain(self, pages: Int32, rows: Places, columns: Places, table: Int32) -> None:
        """That step has come, and its table is full."""
        self._pages = pages
        self._table[rows, columns] = table[rows, columns]

    def go_on(self, pages: Int32, new: Words) -> None:
        """The rows of the step before have pages[r] now, with those of `new`, row after row. Raises CodecError where that cannot be."""
        if pages.size != self._pages.size:
            raise CodecError(f"{pages.size} rows are to go on, and the step before had {self._pages.size}")
        gained = pages - self._pages
        rows = gained.nonzero()[0]
        amounts, begins = gained[rows].tolist(), self._pages[rows].tolist()
        if sum(amounts) != new.size or min(amounts, default=0) < 0:
            raise CodecError(f"rows need {sum(amounts)} pages more, and {new.size} are there")
        self._pages = pages
        self._widen(max(map(sum, zip(amounts, begins, strict=True)), default=0))
        at = 0
        for row, begin, amount in zip(rows.tolist(), begins, amounts, strict=True):
            self._table[row, begin : begin + amount] = new[at : at + amount]
            at += amount

    def replace(self, places: Words, kept: Words, pages: Int32, new: Words) -> None:
        """As `go_on`, but row r begins with the first kept[r] pages of row places[r] of the step before; beyond its rows: with none."""
        had = np.append(self._pages, 0)[np.minimum(places, self._pages.size)]
        wrong = np.flatnonzero(kept > had)
        if wrong.size:
            raise CodecError(f"row {wrong[0]} keeps {kept[wrong[0]]} pages of {had[wrong[0]]}")
        width = _wide(int(kept.max(initial=1)))  # not as wide as a row that has gone
        table = np.zeros((places.size, width), np.int32)
        table[kept > 0] = self._table[:, :width][places[kept > 0]]
        self._table, self._pages = table, kept.astype(np.int32)
        self.go_on(pages, new)
        cut = np.flatnonzero((kept < had) | (kept == 0))  # behind the row's own pages there is something else than its first
        behind = np.arange(self._table.shape[1]) >= pages[cut, None]
        self._table[cut] = np.where(behind, self._table[cut, :1], self._table[cut])

    def _widen(self, pages: int) -> None:
        more = _wide(pages) - self._table.shape[1]
        if more > 0:
            self._table = np.concatenate((self._table, np.repeat(self._table[:, :1], more, axis=1)), axis=1)


def _wide(pages: int) -> int:
    return -(-pages // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
