"""Which pages a request holds: prefix lookup, growth, publication. The only caller of BlockPool.

A block has one life: taken → *pending* while the step that fills it runs → published when that step has completed →
cached when its last holder leaves → reused, which takes its key away first. Nobody is ever given a pending block: a
request that would need one is told so (`Match.pending`) and stands back.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from replica.block_pool import BlockPool
from replica.contract.blocks import block_key
from replica.request import Request
from replica.step import BlockCopy


@dataclass(frozen=True, slots=True)
class Match:
    """What the cache holds for a request now, and what starting it would take from the pool."""

    hits: tuple[int, ...]  # blocks it can share, from its first token on
    copy_source: int | None  # its last block, cached too: to be copied, so that one token alone is recomputed
    fresh: int  # blocks to be allocated
    pinned: int  # cached blocks, no longer evictable once it holds them
    computed: int  # tokens it will not have to compute
    pending: bool  # the next block it needs is being written in the step that is planned now

    @property
    def needed(self) -> int:
        """Blocks that starting it takes out of the available ones."""
        return self.fresh + self.pinned

    @property
    def shared(self) -> tuple[int, ...]:
        """Blocks it holds that exist already."""
        return self.hits if self.copy_source is None else (*self.hits, self.copy_source)


@dataclass(frozen=True, slots=True)
class _PlannedStep:
    """What a step that is planned, and not settled yet, writes and copies."""

    pending: set[bytes] = field(default_factory=set)  # membership only
    copy_sources: list[int] = field(default_factory=list)


class KvManager:
    def __init__(self, *, num_blocks: int, block_size: int, caching: bool) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, caching=caching)
        self._caching = caching
        self._planned: deque[_PlannedStep] = deque()  # the one that runs, and the one planned while it does

    def match(self, request: Request) -> Match:
        """Longest cached prefix of `request`; changes nothing.

        At least one token stays to be computed. Where every token is cached, the last block is copied if the pool has
        room for the source too, else recomputed.
        """
        size = self.block_size
        pool = self.pool
        length = len(request.tokens)
        hits: list[int] = []
        pinned = 0
        source: int | None = None
        pending = False
        if self._caching and not request.unscored:
            shareable = (length - 1) // size
            for position, key in enumerate(request.keys):
                block = pool.find(key)
                if block is None:
                    pending = position < shareable and any(key in step.pending for step in self._planned)
                    break
                if position == shareable:
                    source = block
                    break
                hits.append(block)
                pinned += pool.references(block) == 0
        fresh = -(-length // size) - len(hits)
        if source is not None:
            source_pinned = pool.references(source) == 0
            if fresh + pinned + source_pinned <= pool.available:
                pinned += source_pinned
            else:
                source = None
        request.history.known_hits = len(hits)
        computed = len(hits) * size if source is None else length - 1
        return Match(hits=tuple(hits), copy_source=source, fresh=fresh, pinned=pinned, computed=computed, pending=pending)

    def awaited(self, request: Request, match: Match) -> bytes | None:
        """Key of the block for which `request` would stand back if it were pending; None if it needs no such block."""
        position = len(match.hits)
        shareable = min(len(request.keys), (len(request.tokens) - 1) // self.block_size)
        return request.keys[position] if self._caching and not request.unscored and position < shareable else None

    def start(self, request: Request, match: Match) -> BlockCopy | None:
        """Give `request` the pages of all its tokens; `match` was made in this very state. Needs `match.needed` available."""
        assert not request.blocks and match.needed <= self.pool.available
        pool = self.pool
        for block in match.hits:
            pool.pin(block)
        request.history.own_blocks = match.needed
        if match.copy_source is not None:
            request.history.own_blocks -= pool.references(match.copy_source) == 0  # it goes back with the step
            pool.pin(match.copy_source)
            self._planned[-1].copy_sources.append(match.copy_source)
        request.blocks = [*match.hits, *(pool.allocate() for _ in range(match.fresh))]
        request.keyed = len(match.hits)
        request.computed = match.computed
        if match.copy_source is None:
            return None
        return BlockCopy(source=match.copy_source, target=request.blocks[request.keyed])

    def grow(self, request: Request) -> None:
        """One page more for the next token. Needs one available."""
        request.blocks.append(self.pool.allocate())
        request.history.own_blocks += 1

    def begin_step(self) -> None:
        """A step is going to be planned: what is started and announced from now on belongs to it."""
        self._planned.append(_PlannedStep())

    def announce(self, request: Request, end: int) -> None:
        """The step being planned computes `request` up to position `end`: the blocks it fills are pending."""
        if self._caching:
            self._planned[-1].pending.update(request.keys[request.keyed : end // self.block_size])

    def publish(self, request: Request) -> None:
        """A step has completed: the blocks of `request` that are full now become findable."""
        if not self._caching:
            return
        size = self.block_size
        full = request.computed // size
        done = request.keyed
        if full <= done:
            return
        keys = request.keys
        while len(keys) < full:
            at = len(keys) * size
            keys.append(block_key(keys[-1] if keys else request.terms.root, request.tokens[at : at + size]))
        parent = keys[done - 1] if done else request.terms.root
        self.pool.publish(request.blocks[done:full], keys[done:full], parent)
        request.keyed = full

    def end_step(self) -> None:
        """The first of the planned steps has completed or failed: what it wrote is pending no more, copied pages are free to go."""
        self._end(self._planned.popleft())

    def drop_step(self) -> None:
        """The step planned last will not run."""
        self._end(self._planned.pop())

    def _end(self, step: _PlannedStep) -> None:
        for block in step.copy_sources:
            self.pool.release_one(block)

    def release(self, request: Request) -> None:
        """Take all pages of `request` back; what is published stays findable until it is reused."""
        self.pool.release(request.blocks)
        request.blocks = []
        request.keyed = 0
        request.computed = 0

    def check(self, holders: Iterable[Request]) -> None:
        """Every reference is one holder's; what a request holds has the right content names."""
        self.pool.check()
        held: Counter[int] = Counter(block for step in self._planned for block in step.copy_sources)
        for request in holders:
            held.update(request.blocks)
            assert request.computed <= len(request.blocks) * self.block_size, f"request {request.number} computed more than it holds"
            for block, key in zip(request.blocks[: request.keyed], request.keys, strict=False):
                assert self.pool.key(block) in (None, key), f"block {block} of request {request.number} has another content's key"
            for block in request.blocks[request.keyed :]:
                assert self.pool.key(block) is None, f"block {block} of request {request.number} is findable before it is written"
        for block in range(self.pool.count):
            assert self.pool.references(block) == held[block], (
                f"block {block}: {self.pool.references(block)} references, {held[block]} holders"
            )
