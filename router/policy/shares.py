"""Who has had how much lately, and who is there at all: what weights and floors are held against."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

HALF_LIFE_S = 10.0
ACTIVE_S = 10.0  # whoever has not asked for so long has no claim
KEYS_MAX = 4096
_RESCALE_S = 500 * HALF_LIFE_S
_ROUNDED = 1e-6


@dataclass(slots=True)
class _Entry:
    seen_s: float
    weight: float
    used: float = 0.0  # in units that grow by two every half-life: nothing has to be aged


class Shares:
    """Forgetful use per key. Each question costs the same, however many keys there are."""

    def __init__(self, weight_of: Callable[[str], float], keys_max: int = KEYS_MAX) -> None:
        self._weight_of = weight_of
        self._keys_max = keys_max
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the longest unseen first
        self._weights = 0.0
        self._used = 0.0
        self._origin_s = 0.0

    def seen(self, key: str, now: float) -> None:
        """It asks for something."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(now, self._weight_of(key))
            self._weights += entry.weight
        entry.seen_s = now
        self._entries.move_to_end(key)
        longest = next(iter(self._entries.values()))
        if now - longest.seen_s > ACTIVE_S or len(self._entries) > self._keys_max:
            self._expire(now)

    def charge(self, key: str, amount: float, now: float) -> None:
        """It got something."""
        self.seen(key, now)
        if now - self._origin_s > _RESCALE_S:
            self._rescale(now)
        units = amount * 2.0 ** ((now - self._origin_s) / HALF_LIFE_S)
        self._entries[key].used += units
        self._used += units

    def fraction(self, key: str, now: float) -> float:
        """Of all that those who are there have had lately."""
        self._expire(now)
        entry = self._entries.get(key)
        return 0.0 if entry is None or self._used <= 0 else entry.used / self._used

    def exceeds(self, key: str, now: float) -> bool:
        """It has had more than its weight among those who are there. Alone, nobody does."""
        self._expire(now)
        entry = self._entries.get(key)
        if entry is None or len(self._entries) < 2 or self._used <= 0:
            return False
        return entry.used * self._weights > entry.weight * self._used * (1 + 1e-9)

    def __len__(self) -> int:
        return len(self._entries)

    def _expire(self, now: float) -> None:
        left = 0.0  # what those who leave had used
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if now - entry.seen_s <= ACTIVE_S and len(self._entries) <= self._keys_max:
                break
            del self._entries[key]
            self._weights -= entry.weight
            self._used -= entry.used
            left += entry.used
        if not self._entries:
            self._weights = self._used = 0.0
        elif self._used < _ROUNDED * left:  # of the difference hardly a digit is true
            self._used = sum(entry.used for entry in self._entries.values())

    def _rescale(self, now: float) -> None:
        by = 2.0 ** (-(now - self._origin_s) / HALF_LIFE_S) if now - self._origin_s < 1000 * HALF_LIFE_S else 0.0
        for entry in self._entries.values():
            entry.used *= by
        self._used = sum(entry.used for entry in self._entries.values())
        self._origin_s = now
