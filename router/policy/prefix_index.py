"""Which incarnation holds which KV blocks: a bounded hint, kept from the events in the frames (DESIGN §6, L10).

Every incarnation has a bit. `_holders` maps a block key to the bits of its holders, so a prompt is matched against all
replicas in one walk over its keys. A bit whose incarnation is gone is ignored at once (`_live`) and swept out later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from replica.contract.messages import Frame, KvEvent, Removed, Snapshot, Stored
from router.policy.incarnation import Incarnation
from router.policy.prefix_match import PrefixMatch

ENTRY_BYTES = 240  # of one key: the 16-byte key object, its node in the OrderedDict, the bits; measured by a test
_RETIRED_BITS_MAX = 32  # then they are swept
_STALE_MAX = 8  # frames in a row from the past: it is our sequence that is wrong


class _Alone(dict[int, dict[int, None]]):
    """Bit → attempts, with one attempt in it: shared by all keys that nobody else brings. Who joins in gets a copy."""


@dataclass(slots=True)
class _View:
    """What is known of one incarnation. `sequence` None: nothing, a snapshot is awaited."""

    bit: int
    sequence: int | None = None
    stale: int = 0  # frames in a row that claimed to be older
    coming: dict[int, tuple[bytes, ...]] = field(default_factory=dict)  # attempt → keys it will bring


class PrefixIndex:
    """Longest cached prefix per incarnation. Memory of the index stays below `bytes_max`; the least recently used leave first."""

    def __init__(self, bytes_max: int) -> None:
        self._entries_max = max(1, bytes_max // ENTRY_BYTES)
        self._holders: OrderedDict[bytes, int] = OrderedDict()
        self._views: dict[Incarnation, _View] = {}
        self._names: dict[int, Incarnation] = {}  # of the live bits
        self._live = 0
        self._retired = 0
        self._coming: dict[bytes, dict[int, dict[int, None]]] = {}  # key → bit → attempts that will bring it
        self.resyncs = 0
        self.stale = 0  # frames and snapshots that told nothing new and said that they did

    # --- lives -------------------------------------------------------------------------------------------------------

    def add(self, incarnation: Incarnation) -> None:
        """A replica connected: nothing is known of its cache until its snapshot comes. Ask for one."""
        self.remove(incarnation)
        self._views[incarnation] = _View(self._new_bit(incarnation))

    def remove(self, incarnation: Incarnation) -> None:
        view = self._views.get(incarnation)
        if view is None:
            return
        for attempt in tuple(view.coming):
            self.settled(incarnation, attempt)
        del self._views[incarnation]
        self._retire(view.bit)

    # --- what replicas tell ------------------------------------------------------------------------------------------

    def frame(self, incarnation: Incarnation, frame: Frame) -> bool:
        """Take a frame's events. True: something was missed, the view is dropped and a snapshot must be asked for."""
        view = self._views.get(incarnation)
        if view is None or frame.epoch != incarnation.epoch or view.sequence is None:
            return False  # not ours, late, or a snapshot is on its way anyhow
        if frame.sequence == view.sequence + frame.batches:
            for event in frame.events:
                self._apply(incarnation, view, event)
            view.sequence = frame.sequence
            view.stale = 0
            return False
        if frame.sequence <= view.sequence:
            self.stale += 1
            view.stale += 1
            if view.stale < _STALE_MAX:
                return False  # a repetition
        self._forget(incarnation, view)
        self.resyncs += 1
        return True

    def snapshot(self, incarnation: Incarnation, snapshot: Snapshot) -> None:
        """All blocks of an incarnation; those of another epoch, or older than what is known, are ignored."""
        view = self._views.get(incarnation)
        if view is None:
            return
        if snapshot.epoch != incarnation.epoch or (view.sequence is not None and snapshot.sequence < view.sequence):
            self.stale += 1
            return
        if view.sequence is not None:
            self._forget(incarnation, view)
        self._store(view, (key for key, _ in snapshot.blocks))
        view.sequence = snapshot.sequence
        view.stale = 0

    def _apply(self, incarnation: Incarnation, view: _View, event: KvEvent) -> None:
        if isinstance(event, Stored):
            self._store(view, event.keys)
        elif isinstance(event, Removed):
            for key in event.keys:
                held = self._holders.get(key)
                if held is None:
                    continue  # unknown, evicted here, or removed already
                held &= ~view.bit
                if held & self._live:
                    self._holders[key] = held
                else:
                    del self._holders[key]
        else:
            self._forget(incarnation, view)

    def _store(self, view: _View, keys: Iterable[bytes]) -> None:
        holders = self._holders
        for key in keys:
            holders[key] = holders.get(key, 0) | view.bit
            holders.move_to_end(key)
        while len(holders) > self._entries_max:
            holders.popitem(last=False)

    # --- what the router has under way -------------------------------------------------------------------------------

    def dispatched(self, incarnation: Incarnation, attempt: int, keys: Sequence[bytes], held: int) -> None:
        """An attempt was sent: its blocks beyond the first `held` count as hits to come, until `settled`."""
        view = self._views.get(incarnation)
        if view is None:
            return
        fresh = tuple(keys[held:])
        view.coming[attempt] = fresh
        if self._coming.keys().isdisjoint(fresh):  # mostly: a prompt of its own costs no walk over its keys
            self._coming.update(dict.fromkeys(fresh, _Alone({view.bit: {attempt: None}})))
            return
        for key in fresh:
            by_bit = self._coming.get(key)
            if by_bit is None or isinstance(by_bit, _Alone):
                by_bit = self._coming[key] = {bit: dict(attempts) for bit, attempts in (by_bit or {}).items()}
            by_bit.setdefault(view.bit, {})[attempt] = None

    def settled(self, incarnation: Incarnation, attempt: int) -> None:
        """The attempt's prefill is done (its blocks are reported by events now) or it will never be. Idempotent."""
        view = self._views.get(incarnation)
        fresh = view.coming.pop(attempt, ()) if view is not None else ()
        for key in fresh:
            assert view is not None
            by_bit = self._coming[key]
            if isinstance(by_bit, _Alone):
                del self._coming[key]
                continue
            attempts = by_bit[view.bit]
            del attempts[attempt]
            if not attempts:
                del by_bit[view.bit]
                if not by_bit:
                    del self._coming[key]

    # --- the question ------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> PrefixMatch:
        """Leading blocks of `keys` each incarnation holds or will hold. Refreshes what it finds."""
        levels: list[tuple[int, int]] = []
        alive = self._live
        depth = 0
        for key in keys:
            mask = self._holders.get(key, 0)
            by_bit = self._coming.get(key)
            if by_bit:
                for bit in by_bit:
                    mask |= bit
            mask &= alive
            if mask != alive:
                if depth:
                    levels.append((depth, alive))
                alive = mask
                if not mask:
                    break
            depth += 1
        if alive and depth:
            levels.append((depth, alive))
        for key in reversed(keys[:depth]):  # a chain's head is the last to be evicted
            if key in self._holders:
                self._holders.move_to_end(key)
        return PrefixMatch(levels, self._bit_of, self._names)

    @property
    def entries(self) -> int:
        return len(self._holders)

    @property
    def coming(self) -> int:
        """Keys that attempts under way will bring."""
        return len(self._coming)

    # --- bits --------------------------------------------------------------------------------------------------------

    def _forget(self, incarnation: Incarnation, view: _View) -> None:
        """Drop all entries of the view by giving it another bit; attempts under way keep their hits to come."""
        old, view.bit = view.bit, self._new_bit(incarnation)
        for attempt, keys in view.coming.items():
            for key in keys:
                by_bit = self._coming[key]
                by_bit.get(old, {}).pop(attempt, None)
                if not by_bit.get(old, True):
                    del by_bit[old]
                by_bit.setdefault(view.bit, {})[attempt] = None
        self._retire(old)
        view.sequence = None

    def _bit_of(self, incarnation: Incarnation) -> int:
        view = self._views.get(incarnation)
        return 0 if view is None else view.bit

    def _new_bit(self, incarnation: Incarnation) -> int:
        """The lowest bit that neither lives nor waits to be swept."""
        free = ~(self._live | self._retired)
        bit = free & -free
        self._live |= bit
        self._names[bit] = incarnation
        return bit

    def _retire(self, bit: int) -> None:
        self._live &= ~bit
        del self._names[bit]
        self._retired |= bit
        if self._retired.bit_count() < _RETIRED_BITS_MAX:
            return
        for key in tuple(self._holders):
            held = self._holders[key] & self._live
            if held:
                self._holders[key] = held
            else:
                del self._holders[key]
        self._retired = 0
