"""A prefix cache by its keys alone: so many blocks, plainly the least recently used leaves first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from replica.contract.messages import KvEvent, Removed, Stored

NO_PARENT = b"\0" * 16  # events of a cost model name no parents: the router's index asks for none


class BlockCache:
    """`events` collects what was stored and removed until somebody takes it."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self.events: list[KvEvent] = []

    def __len__(self) -> int:
        return len(self._keys)

    def hit(self, keys: Sequence[bytes]) -> int:
        """Leading blocks that are here."""
        hit = 0
        for key in keys:
            if key not in self._keys:
                break
            hit += 1
        return hit

    def touch(self, keys: Sequence[bytes]) -> None:
        """They are used now, in this order."""
        for key in keys:
            if key in self._keys:
                self._keys.move_to_end(key)

    def store(self, keys: Sequence[bytes]) -> None:
        fresh = tuple(key for key in keys if key not in self._keys)
        if not fresh:
            return
        self._keys.update(dict.fromkeys(fresh))
        self.events.append(Stored(fresh, NO_PARENT))
        gone = []
        while len(self._keys) > self._blocks:
            gone.append(self._keys.popitem(last=False)[0])
        if gone:
            self.events.append(Removed(tuple(gone)))

    def take_events(self) -> tuple[KvEvent, ...]:
        taken, self.events = tuple(self.events), []
        return taken

    def snapshot(self) -> tuple[tuple[bytes, bytes], ...]:
        return tuple((key, NO_PARENT) for key in self._keys)
