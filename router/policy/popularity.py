"""How often a prefix was used lately: what many share is worth copying to one more replica (RTR-04)."""

from __future__ import annotations

from collections import OrderedDict

_HALF_LIFE_S = 10.0


class Popularity:
    """Forgetful count of uses per block key, for at most `entries_max` keys; the least recently used leave first."""

    def __init__(self, entries_max: int = 4096) -> None:
        self._entries_max = entries_max
        self._uses: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # key → uses as of then, then (s)

    def uses(self, key: bytes, now: float) -> float:
        uses, then_s = self._uses.get(key, (0.0, now))
        return float(uses * 0.5 ** ((now - then_s) / _HALF_LIFE_S))

    def use(self, key: bytes, now: float) -> None:
        self._uses[key] = (self.uses(key, now) + 1.0, now)
        self._uses.move_to_end(key)
        if len(self._uses) > self._entries_max:
            self._uses.popitem(last=False)

    def __len__(self) -> int:
        return len(self._uses)
