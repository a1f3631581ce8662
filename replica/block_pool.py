"""The pages of a KV pool: who holds them, what they contain, which is reused next. Knows no request.

Every block is in exactly one of three conditions:

    referenced   references > 0            (with or without a key)
    cached       references = 0, has a key (findable, evictable)
    free         references = 0, no key

Free and cached blocks stand in one list, the next one to be reused at its head: free blocks enter at the head, cached ones
at the tail, so cached blocks stand in order of last use. Every operation is O(1) per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from replica.free_list import FreeList
from replica.kv_events import KvEventLog


class BlockPool:
    """`count` blocks, ids 0 … count-1. With `caching` off no block ever gets a key."""

    def __init__(self, count: int, *, caching: bool = True) -> None:
        if count < 1:
            raise ValueError(f"a pool needs at least one block, not {count}")
        self.count = count
        self.cached = 0
        self.events = KvEventLog()
        self._caching = caching
        self._references: list[int] = [0] * count
        self._keys: list[bytes | None] = [None] * count
        self._parents: list[bytes] = [b""] * count
        self._unreferenced = FreeList(count)
        self._index: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Free + cached blocks: what can be allocated."""
        return len(self._unreferenced)

    @property
    def referenced(self) -> int:
        return self.count - self.available

    def references(self, block: int) -> int:
        return self._references[block]

    def key(self, block: int) -> bytes | None:
        return self._keys[block]

    def find(self, key: bytes) -> int | None:
        """The block whose content is named `key`; not pinned."""
        return self._index.get(key)

    def allocate(self) -> int:
        """The least recently used block, with one reference; reuse clears its key. The caller has checked `available`."""
        block = self._unreferenced.head()
        self._unreferenced.remove(block)
        key = self._keys[block]
        if key is not None:
            self.cached -= 1
            del self._index[key]
            self._keys[block] = None
            self.events.removed(key)
        self._references[block] = 1
        return block

    def pin(self, block: int) -> None:
        """One more holder; a cached block stops being evictable."""
        if self._references[block] == 0:
            assert self._keys[block] is not None, f"block {block} pinned, but it holds nothing"
            self._unreferenced.remove(block)
            self.cached -= 1
        self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each block of a chain, given head first: its tail becomes reusable before its head."""
        for block in reversed(blocks):
            self.release_one(block)

    def release_one(self, block: int) -> None:
        references = self._references[block] - 1
        assert references >= 0, f"block {block} released more often than it was held"
        self._references[block] = references
        if references > 0:
            return
        if self._keys[block] is None:
            self._unreferenced.put_first(block)
        else:
            self._unreferenced.put_last(block)
            self.cached += 1

    def publish(self, blocks: Sequence[int], keys: Sequence[bytes], parent: bytes) -> None:
        """The held `blocks` now contain `keys`, a chain that follows `parent`: they become findable.

        Content that another block holds already stays with that one (one content, one findable block).
        """
        if not self._caching:
            return
        run: list[bytes] = []
        run_parent = parent
        for block, key in zip(blocks, keys, strict=True):
            assert self._references[block] > 0, f"block {block} published without a holder"
            if key in self._index:
                self.events.stored(run, run_parent)
                run, run_parent = [], key
            else:
                assert self._keys[block] is None, f"block {block} published under a second key"
                self._keys[block] = key
                self._parents[block] = parent
                self._index[key] = block
                run.append(key)
            parent = key
        self.events.stored(run, run_parent)

    def snapshot(self) -> tuple[tuple[bytes, bytes], ...]:
        """All findable (key, parent), parents before children."""
        children: dict[bytes, list[bytes]] = {}
        heads: list[bytes] = []
        for key, block in self._index.items():
            parent = self._parents[block]
            (children.setdefault(parent, []) if parent in self._index else heads).append(key)
        found: list[tuple[bytes, bytes]] = []
        stack = heads[::-1]
        while stack:
            key = stack.pop()
            found.append((key, self._parents[self._index[key]]))
            stack.extend(reversed(children.get(key, ())))
        return tuple(found)

    def check(self) -> None:
        """Every invariant of the pool, from scratch. O(count): for tests and idle moments."""
        listed = list(islice(self._unreferenced, self.count + 1))
        assert len(listed) == len(set(listed)) == self.available, "the list and its length disagree"
        unreferenced = [block for block in range(self.count) if self._references[block] == 0]
        assert sorted(listed) == unreferenced, "the list must hold the unreferenced blocks and no other"
        keyed = {block: key for block, key in enumerate(self._keys) if key is not None}
        assert {key: block for block, key in keyed.items()} == self._index, "keys and index disagree"
        cached = sum(1 for block in keyed if self._references[block] == 0)
        assert cached == self.cached, f"{cached} cached blocks, counted {self.cached}"
        free = len(listed) - cached
        assert free + cached + self.referenced == self.count
        assert all(self._keys[block] is None for block in listed[:free]), "free blocks must be reused before cached ones"
