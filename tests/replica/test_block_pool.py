"""BlockPool: one identity and one life per block, the order of reuse, events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.block_pool import BlockPool
from replica.contract.messages import Removed, Stored


def keys(*names: str) -> list[bytes]:
    return [name.encode().ljust(16, b".") for name in names]


def filled(count: int, *names: str) -> tuple[BlockPool, list[int]]:
    """A pool of `count` whose first blocks are cached under `names`, a chain."""
    pool = BlockPool(count)
    blocks = [pool.allocate() for _ in names]
    pool.publish(blocks, keys(*names), b"root")
    pool.release(blocks)
    return pool, blocks


def test_a_chain_is_reused_tail_first() -> None:
    pool, blocks = filled(3, "a", "b", "c")
    assert [pool.allocate() for _ in range(3)] == blocks[::-1]


def test_free_blocks_are_reused_before_cached_ones_and_old_before_new() -> None:
    pool, (first,) = filled(3, "a")
    second = pool.allocate()
    pool.publish([second], keys("b"), b"root")
    pool.release([second])
    assert [pool.allocate() for _ in range(3)] == [2, first, second]


def test_use_makes_a_block_young_again() -> None:
    pool, (old,) = filled(2, "a")
    other = pool.allocate()
    pool.publish([other], keys("b"), b"root")
    pool.release([other])
    pool.pin(old)
    pool.release_one(old)
    assert pool.allocate() == other


def test_reuse_clears_the_key_and_tells() -> None:
    pool, blocks = filled(2, "a", "b")
    pool.events.take()
    taken = pool.allocate()
    assert taken == blocks[1] and pool.key(taken) is None and pool.find(keys("b")[0]) is None
    assert pool.events.take() == (Removed(keys=(keys("b")[0],)),)


def test_content_that_is_there_already_keeps_its_block_and_splits_the_event() -> None:
    pool, (block,) = filled(8, "b")
    pool.events.take()
    blocks = [pool.allocate() for _ in range(3)]
    pool.publish(blocks, keys("a", "b", "c"), b"root")
    assert pool.find(keys("b")[0]) == block and pool.key(blocks[1]) is None
    a, b, c = keys("a", "b", "c")
    assert pool.events.take() == (Stored(keys=(a,), parent=b"root"), Stored(keys=(c,), parent=b))
    pool.check()


def test_removal_and_storage_are_told_in_the_order_in_which_they_happened() -> None:
    pool, _ = filled(1, "a")
    pool.events.take()
    block = pool.allocate()
    pool.publish([block], keys("b"), b"root")
    pool.release([block])
    pool.allocate()
    a, b = keys("a", "b")
    assert pool.events.take() == (Removed(keys=(a,)), Stored(keys=(b,), parent=b"root"), Removed(keys=(b,)))


def test_snapshot_names_parents_first_and_orphans_too() -> None:
    pool = BlockPool(8)
    late = [pool.allocate() for _ in range(2)]
    pool.publish(late[1:], keys("b"), keys("a")[0])  # the child becomes findable before its parent
    pool.publish(late[:1], keys("a"), b"root")
    a, b = keys("a", "b")
    assert pool.snapshot() == ((a, b"root"), (b, a))


def test_without_caching_nothing_is_findable() -> None:
    pool = BlockPool(2, caching=False)
    block = pool.allocate()
    pool.publish([block], keys("a"), b"root")
    assert pool.find(keys("a")[0]) is None and pool.events.take() == ()


def test_double_release_is_noticed() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release_one(block)
    with pytest.raises(AssertionError, match="more often"):
        pool.release_one(block)


def test_an_empty_pool_gives_nothing() -> None:
    pool = BlockPool(1)
    pool.allocate()
    with pytest.raises(AssertionError, match="available"):
        pool.allocate()
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.lists(st.tuples(st.sampled_from("apfr"), st.integers(0, 30)), max_size=120))
def test_any_history_keeps_every_invariant(count: int, operations: list[tuple[str, int]]) -> None:
    pool = BlockPool(count)
    held: list[int] = []
    known: set[bytes] = set()
    for operation, number in operations:
        key = keys(str(number))[0]
        if operation == "a" and pool.available:
            held.append(pool.allocate())
        elif operation == "p" and held and pool.key(held[number % len(held)]) is None:
            pool.publish([held[number % len(held)]], [key], b"root")
        elif operation == "f" and pool.find(key) is not None:
            block = pool.find(key)
            assert block is not None
            pool.pin(block)
            held.append(block)
        elif operation == "r" and held:
            pool.release_one(held.pop(number % len(held)))
        pool.check()
        assert pool.referenced == len(set(held))
        for event in pool.events.take():  # whoever follows the events knows what is findable
            known = known | set(event.keys) if isinstance(event, Stored) else known - set(event.keys)
        assert known == {key for key, _ in pool.snapshot()}
