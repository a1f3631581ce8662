"""Which of many replicas a choice looks at: the longest hits and some by chance (pure)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter
from random import Random

from router.policy.known import Known

_order = attrgetter("order")


def likely(candidates: Sequence[Known], holders: Sequence[Known], count: int, random: Random) -> list[Known]:
    """Half of `count` for their hits, half by chance. No candidate is asked for its name: there may be a thousand.

    `candidates` are in the order in which they connected, more than `count`; `holders`, half of `count` at most, need not be among them.
    """
    chosen = [known for known in sorted(holders, key=_order) if _is_among(known, candidates)]
    taken = {known.order for known in chosen}
    return chosen + [known for known in random.sample(candidates, count // 2) if known.order not in taken]


def _is_among(known: Known, candidates: Sequence[Known]) -> bool:
    place = bisect_left(candidates, known.order, key=_order)
    return place < len(candidates) and candidates[place] is known
