"""What routers are told about a replica's cache: removals and storages in the order in which they happened."""

from __future__ import annotations

from collections.abc import Sequence

from replica.contract.messages import KvEvent, Removed, Stored


class KvEventLog:
    """Removals that follow each other become one event."""

    def __init__(self) -> None:
        self._removed: list[bytes] = []
        self._events: list[KvEvent] = []

    def removed(self, key: bytes) -> None:
        self._removed.append(key)

    def stored(self, keys: Sequence[bytes], parent: bytes) -> None:
        """A chain that follows `parent`; nothing for an empty one."""
        if keys:
            self._close_removed()
            self._events.append(Stored(keys=tuple(keys), parent=parent))

    def take(self) -> tuple[KvEvent, ...]:
        """Since the last call."""
        self._close_removed()
        events = tuple(self._events)
        self._events.clear()
        return events

    def _close_removed(self) -> None:
        if self._removed:
            self._events.append(Removed(keys=tuple(self._removed)))
            self._removed.clear()
