"""Who holds how much of one prompt (a value of the prefix index).

A system prompt that a thousand replicas hold must cost no more than one that four hold. So nobody is listed: there is a level for
every length at which somebody's match ends, and whoever is asked for is looked up in the levels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from router.policy.incarnation import Incarnation


class PrefixMatch:
    """Leading blocks by incarnation. To be read before the index changes."""

    __slots__ = ("_bit_of", "_levels", "_names")

    def __init__(self, levels: Sequence[tuple[int, int]], bit_of: Callable[[Incarnation], int], names: Mapping[int, Incarnation]) -> None:
        """`levels`: (blocks, bits of those that hold as many or more), blocks ascending from 1, each with fewer bits than the one before.

        `bit_of` is 0 for who is not known; `names`: whose each bit is."""
        self._levels = levels
        self._bit_of = bit_of
        self._names = names

    @property
    def longest(self) -> int:
        """Blocks of the longest match; 0: nobody has any."""
        return self._levels[-1][0] if self._levels else 0

    def blocks(self, incarnation: Incarnation) -> int:
        """0 for one that is not known, too."""
        levels, bit = self._levels, self._bit_of(incarnation)
        if not levels or not levels[0][1] & bit:
            return 0
        if levels[-1][1] & bit:
            return levels[-1][0]
        return levels[bisect_left(levels, True, key=lambda level: not level[1] & bit) - 1][0]

    def holders(self, count: int) -> list[Incarnation]:
        """At most `count` of those that hold any, the longest matches first."""
        found: list[Incarnation] = []
        longer = 0
        for _, holders in reversed(self._levels):
            ended = holders & ~longer
            longer = holders
            while ended and len(found) < count:
                bit = ended & -ended
                found.append(self._names[bit])
                ended ^= bit
        return found
