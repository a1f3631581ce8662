"""Which incarnation holds which KV blocks: a bounded hint, kept from the events in the frames (DESIGN §6, L10).

Every incarnation has a bit. `_holders` maps a block key to the bits of its holders, so a prompt is matched against all
replicas in one walk over its keys. A bit whose incarnation is gone is ignored at once (`_live`) and swept out later.

`_holders` is a plain dict, the least recently used first: to use a key is to take it out and put it in again, half the work that an
OrderedDict has with it. What an attempt will bring is one run of a chain, under the first of its keys: a key tells all before it, so
where two chains part they stay apart, and nobody has to look at each key of a run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from replica.contract.messages import Frame, KvEvent, Removed, Snapshot, Stored
from router.policy.incarnation import Incarnation
from router.policy.prefix_match import PrefixMatch

ENTRY_BYTES = 240  # of one key, at most: the 16-byte key object, its place in a dict that has just grown, the bits; measured by a test
_EVICTED_PART = 64  # of all entries, as many leave at once: to look for the oldest one costs as much as for a thousand
_RETIRED_BITS_MAX = 32  # then they are swept
_STALE_MAX = 8  # frames in a row from the past: it is our sequence that is wrong


@dataclass(slots=True)
class _View:
    """What is known of one incarnation. `sequence` None: nothing, a snapshot is awaited."""

    bit: int
    sequence: int | None = None
    stale: int = 0  # frames in a row that claimed to be older
    coming: dict[int, _Run] = field(default_factory=dict)  # by attempt


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Keys that an attempt will bring: at least one, each the next block of the one before it."""

    view: _View
    keys: tuple[bytes, ...]

    def common(self, keys: Sequence[bytes], depth: int) -> int:
        """How many of `keys`, from `depth` on, it begins with; the first one it does."""
        longest = min(len(self.keys), len(keys) - depth)
        return bisect_left(range(longest), True, key=lambda place: self.keys[place] != keys[depth + place])


class PrefixIndex:
    """Longest cached prefix per incarnation. Memory of the index stays below `bytes_max`; the least recently used leave first."""

    def __init__(self, bytes_max: int) -> None:
        self._entries_max = max(1, bytes_max // ENTRY_BYTES)
        self._evicted = max(1, self._entries_max // _EVICTED_PART)
        self._holders: dict[bytes, int] = {}
        self._views: dict[Incarnation, _View] = {}
        self._names: dict[int, Incarnation] = {}  # of the live bits
        self._live = 0
        self._retired = 0
        self._coming: dict[bytes, dict[int, _Run]] = {}  # first key → attempt → what it will bring
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
        keys = dict.fromkeys(keys, view.bit)
        if holders.keys().isdisjoint(keys):  # mostly: blocks of a prompt of its own
            holders.update(keys)
        else:
            for key in keys:
                held = holders.pop(key, 0)
                holders[key] = held | view.bit
        if len(holders) > self._entries_max:
            leave = max(len(holders) - self._entries_max, self._evicted)
            for key in tuple(islice(holders, leave)):
                del holders[key]

    # --- what the router has under way -------------------------------------------------------------------------------

    def dispatched(self, incarnation: Incarnation, attempt: int, keys: Sequence[bytes], held: int) -> None:
        """An attempt was sent: its blocks beyond the first `held` count as hits to come, until `settled`."""
        view = self._views.get(incarnation)
        fresh = tuple(keys[held:])
        if view is not None and fresh:
            run = view.coming[attempt] = _Run(view, fresh)
            self._coming.setdefault(fresh[0], {})[attempt] = run

    def settled(self, incarnation: Incarnation, attempt: int) -> None:
        """The attempt's prefill is done (its blocks are reported by events now) or it will never be. Idempotent."""
        view = self._views.get(incarnation)
        run = None if view is None else view.coming.pop(attempt, None)
        if run is None:
            return
        first = run.keys[0]
        runs = self._coming[first]
        del runs[attempt]
        if not runs:
            del self._coming[first]

    # --- the question ------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> PrefixMatch:
        """Leading blocks of `keys` each incarnation holds or will hold. Refreshes what it finds."""
        levels: list[tuple[int, int]] = []
        alive = self._live
        depth = 0
        holders, coming = self._holders, self._coming
        ends: dict[int, int] = {}  # bit → depth to which it will hold what was asked so far
        for key in keys:
            mask = holders.get(key, 0)
            if coming and (runs := coming.get(key)) is not None:
                for run in runs.values():
                    bit = run.view.bit
                    end = ends.get(bit, 0)
                    if end < min(depth + len(run.keys), len(keys)):
                        ends[bit] = max(end, depth + run.common(keys, depth))
            if ends:
                for bit, end in ends.items():
                    if depth < end:
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
            held = holders.pop(key, 0)
            if held:
                holders[key] = held
        return PrefixMatch(levels, self._bit_of, self._names)

    @property
    def entries(self) -> int:
        return len(self._holders)

    @property
    def coming(self) -> int:
        """Attempts under way that will bring something."""
        return sum(map(len, self._coming.values()))

    # --- bits --------------------------------------------------------------------------------------------------------

    def _forget(self, incarnation: Incarnation, view: _View) -> None:
        """Drop all entries of the view by giving it another bit; attempts under way keep their hits to come."""
        old, view.bit = view.bit, self._new_bit(incarnation)
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
