"""Blocks that nobody holds, in the order in which they are to be reused: a doubly linked list inside two flat lists."""

from __future__ import annotations

from collections.abc import Iterator

_ENDS = 0  # slot of the sentinel; block i has slot i + 1


class FreeList:
    """Begins with all of 0 … count-1. Every operation but iteration is O(1)."""

    def __init__(self, count: int) -> None:
        self._next: list[int] = [*range(1, count + 1), _ENDS]
        self._previous: list[int] = [count, *range(count)]
        self._length = count

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Next to be reused first. Checks every link on its way."""
        slot = self._next[_ENDS]
        while slot != _ENDS:
            assert self._previous[self._next[slot]] == slot, "broken links"
            yield slot - 1
            slot = self._next[slot]

    def head(self) -> int:
        """The block to be reused next; it stays in the list."""
        slot = self._next[_ENDS]
        assert slot != _ENDS, "no block available"
        return slot - 1

    def put_first(self, block: int) -> None:
        self._insert(block + 1, _ENDS, self._next[_ENDS])

    def put_last(self, block: int) -> None:
        self._insert(block + 1, self._previous[_ENDS], _ENDS)

    def remove(self, block: int) -> None:
        """`block` must be in the list."""
        slot = block + 1
        left, right = self._previous[slot], self._next[slot]
        self._next[left] = right
        self._previous[right] = left
        self._length -= 1

    def _insert(self, slot: int, left: int, right: int) -> None:
        self._next[slot], self._previous[slot] = right, left
        self._next[left] = slot
        self._previous[right] = slot
        self._length += 1
