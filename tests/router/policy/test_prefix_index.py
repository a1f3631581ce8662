import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.contract.messages import Cleared, Frame, KvEvent, Removed, Snapshot, Stored
from router.policy import prefix_index
from router.policy.incarnation import Incarnation
from router.policy.prefix_index import ENTRY_BYTES, PrefixIndex
from tests.router.modelled_replica import ModelledReplica

R0, R1 = Incarnation("r0", 1), Incarnation("r1", 1)
LOAD = ModelledReplica("x").load()


def keys(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(16, "little") for number in numbers)


def frame(sequence: int, *events: KvEvent, batches: int | None = None, epoch: int = 1) -> Frame:
    return Frame(epoch=epoch, sequence=sequence, load=LOAD, events=events, batches=bool(events) if batches is None else batches)


def stored(*numbers: int) -> Stored:
    return Stored(keys(*numbers), b"")


def hits(index: PrefixIndex, asked: tuple[bytes, ...]) -> dict[Incarnation, int]:
    """Of everybody who holds any, read both ways."""
    match = index.match(asked)
    found = {one: match.blocks(one) for one in match.holders(1_000)}
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert match.longest == max(found.values(), default=0)
    return found


def synced(*incarnations: Incarnation, bytes_max: int = 1 << 20) -> PrefixIndex:
    index = PrefixIndex(bytes_max)
    for incarnation in incarnations:
        index.add(incarnation)
        index.snapshot(incarnation, Snapshot(incarnation.epoch, 0, ()))
    return index


def test_longest_prefix_of_each_replica() -> None:
    index = synced(R0, R1)
    assert not index.frame(R0, frame(1, stored(1, 2, 3)))
    assert not index.frame(R1, frame(1, stored(1)))
    assert hits(index, keys(1, 2, 3, 4)) == {R0: 3, R1: 1}
    assert hits(index, keys(9, 1, 2)) == {}


def test_a_hole_ends_the_match() -> None:
    index = synced(R0)
    index.frame(R0, frame(1, stored(1, 2, 3)))
    index.frame(R0, frame(2, Removed(keys(2))))
    assert hits(index, keys(1, 2, 3)) == {R0: 1}


def test_unknown_and_repeated_removals_are_no_ops_and_the_rest_of_the_frame_counts() -> None:
    index = synced(R0, R1)
    index.frame(R1, frame(1, stored(1)))
    index.frame(R0, frame(1, stored(1, 2)))
    index.frame(R0, frame(2, Removed(keys(7, 2, 2)), stored(5)))
    assert hits(index, keys(1, 2)) == {R0: 1, R1: 1}
    assert hits(index, keys(5)) == {R0: 1}


def test_cleared_forgets_only_that_replica() -> None:
    index = synced(R0, R1)
    index.frame(R0, frame(1, stored(1, 2)))
    index.frame(R1, frame(1, stored(1, 2)))
    index.frame(R0, frame(2, Cleared(), stored(1)))
    assert hits(index, keys(1, 2)) == {R0: 1, R1: 2}
    assert not index.frame(R0, frame(3, stored(2)))
    assert hits(index, keys(1, 2)) == {R0: 2, R1: 2}


def test_a_gap_drops_the_view_and_asks_once_until_the_snapshot_comes() -> None:
    index = synced(R0, R1)
    index.frame(R0, frame(1, stored(1)))
    index.frame(R1, frame(1, stored(1)))
    assert index.frame(R0, frame(3, stored(3)))
    assert hits(index, keys(1)) == {R1: 1}
    assert not index.frame(R0, frame(4, stored(4))), "it is asked for already"
    index.snapshot(R0, Snapshot(1, 4, tuple((key, b"") for key in keys(1, 3, 4))))
    assert hits(index, keys(1)) == {R0: 1, R1: 1}
    assert not index.frame(R0, frame(4, stored(9))), "a repetition"
    assert hits(index, keys(9)) == {}
    assert not index.frame(R0, frame(5, stored(5)))
    assert hits(index, keys(5)) == {R0: 1}


def test_merged_frames_are_no_gap() -> None:
    index = synced(R0)
    assert not index.frame(R0, frame(3, stored(1), batches=3))
    assert not index.frame(R0, frame(3))
    assert index.frame(R0, frame(4)), "the number moved, the events did not come"


def test_another_epoch_is_ignored_and_a_new_incarnation_starts_empty() -> None:
    index = synced(R0)
    index.frame(R0, frame(1, stored(1)))
    reborn = Incarnation("r0", 2)
    index.remove(R0)
    index.add(reborn)
    index.snapshot(reborn, Snapshot(2, 0, ()))
    assert hits(index, keys(1)) == {}
    assert not index.frame(reborn, frame(2, stored(1), epoch=1))
    for epoch in (1, 3):
        index.snapshot(reborn, Snapshot(epoch, 9, ((keys(1)[0], b""),)))
    assert hits(index, keys(1)) == {} and index.stale == 2


def test_before_its_snapshot_nothing_is_believed() -> None:
    index = PrefixIndex(1 << 20)
    index.add(R0)
    assert not index.frame(R0, frame(1, stored(1)))
    assert hits(index, keys(1)) == {}


def test_an_attempt_in_flight_is_a_hit_to_come_until_it_is_settled() -> None:
    index = synced(R0, R1)
    index.dispatched(R0, 7, keys(1, 2, 3), held=0)
    index.dispatched(R0, 8, keys(1, 2), held=0)
    assert hits(index, keys(1, 2, 3)) == {R0: 3}
    index.settled(R0, 7)
    assert hits(index, keys(1, 2, 3)) == {R0: 2}
    index.settled(R0, 7)
    index.settled(R0, 8)
    assert hits(index, keys(1)) == {}
    assert index.coming == 0


@given(st.lists(st.tuples(st.sampled_from([R0, R1]), st.integers(0, 5), st.integers(0, 4), st.booleans()), max_size=40))
def test_hits_to_come_are_those_of_the_attempts_under_way(moves: list[tuple[Incarnation, int, int, bool]]) -> None:
    """Whoever shares a chain with whom, on one replica or on two, and in whatever order they end."""
    index = synced(R0, R1)
    under_way: dict[int, tuple[Incarnation, int]] = {}
    for attempt, (one, length, victim, resync) in enumerate(moves):
        index.dispatched(one, attempt, keys(*range(length)), held=0)
        under_way[attempt] = (one, length)
        if resync:
            assert index.frame(one, frame(10 * attempt + 10, stored(99)))
            index.snapshot(one, Snapshot(1, 10 * attempt + 10, ()))
        if victim < len(under_way):
            gone = list(under_way)[victim]
            index.settled(under_way.pop(gone)[0], gone)
        expected = {each: max((n for holder, n in under_way.values() if holder == each), default=0) for each in (R0, R1)}
        assert hits(index, keys(*range(5))) == {each: n for each, n in expected.items() if n}
    for attempt, (one, _) in under_way.items():
        index.settled(one, attempt)
    assert index.coming == 0


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 6)), max_size=12),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=4),
    st.integers(0, 2),
)
def test_hits_to_come_begin_where_those_that_were_there_end(
    sent: list[tuple[int, int, int]], told: list[tuple[int, int]], asked: int
) -> None:
    """Three chains that part after the second block; attempts bring what lies beyond the blocks that were held when they were sent."""
    chains = [keys(1, 2, *range(10 * chain, 10 * chain + 4)) for chain in (1, 2, 3)]
    index = synced(R0)
    will_be: dict[bytes, None] = {}
    for number, (chain, length) in enumerate(told):
        index.frame(R0, frame(number + 1, Stored(chains[chain][:length], b"")))
        will_be |= dict.fromkeys(chains[chain][:length])
    for attempt, (chain, length, held) in enumerate(sent):
        index.dispatched(R0, attempt, chains[chain][:length], held=held)
        will_be |= dict.fromkeys(chains[chain][:length][held:])
    expected = next((depth for depth, key in enumerate(chains[asked]) if key not in will_be), 6)
    assert hits(index, chains[asked]) == ({R0: expected} if expected else {})


def test_hits_to_come_survive_a_resync_and_go_with_the_incarnation() -> None:
    index = synced(R0)
    index.dispatched(R0, 7, keys(1, 2), held=0)
    assert index.frame(R0, frame(5, stored(4)))
    assert hits(index, keys(1, 2)) == {R0: 2}
    index.remove(R0)
    assert index.coming == 0
    index.settled(R0, 7)


def test_the_cap_holds_in_bytes_and_the_least_recently_used_leave_first() -> None:
    index = synced(R0, bytes_max=100 * ENTRY_BYTES)
    index.frame(R0, frame(1, stored(*range(100))))
    index.match(keys(0, 1, 2))
    index.frame(R0, frame(2, stored(*range(200, 250))))
    assert index.entries == 100
    assert hits(index, keys(0, 1, 2)) == {R0: 3}, "used just now"
    assert hits(index, keys(3)) == {}


def test_many_leave_at_once_and_never_more_than_a_few_of_all() -> None:
    index = synced(R0, bytes_max=1_000 * ENTRY_BYTES)
    for sequence in range(1, 400):
        first = 7 * sequence
        index.frame(R0, frame(sequence, stored(*range(first, first + 7))))
        assert index.entries <= 1_000
        if sequence > 200:
            assert index.entries >= 1_000 - 2 * 1_000 // 64
            assert hits(index, keys(*range(first, first + 7))) == {R0: 7}, "the latest stay"
    assert hits(index, keys(*range(7, 14))) == {}


def test_an_entry_costs_what_the_cap_believes() -> None:
    index = synced(R0, R1, bytes_max=1 << 30)
    tracemalloc.start()
    index.frame(R0, frame(1, stored(*range(50_000))))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown / 50_000 < ENTRY_BYTES


def test_bits_of_the_dead_are_swept_and_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    index = synced(R1)
    index.frame(R1, frame(1, stored(1)))
    for epoch in range(200):
        one = Incarnation("r0", epoch)
        index.add(one)
        index.snapshot(one, Snapshot(epoch, 0, tuple((key, b"") for key in keys(1, 2, 1000 + epoch))))
        assert hits(index, keys(1, 2))[one] == 2
        index.remove(one)
    assert hits(index, keys(1, 2)) == {R1: 1}
    assert max(index._holders.values()).bit_length() < 2 * prefix_index._RETIRED_BITS_MAX
    assert index.entries < 2 + prefix_index._RETIRED_BITS_MAX


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_it_agrees_with_plain_sets_whatever_is_lost_or_repeated(data: st.DataObject) -> None:
    """After every snapshot the view is the replica's truth; between them, never a block that was not reported."""
    replicas = [R0, R1]
    truth: dict[Incarnation, set[int]] = {one: set() for one in replicas}
    sequence = dict.fromkeys(replicas, 0)
    index = synced(*replicas)
    for _ in range(data.draw(st.integers(1, 30))):
        one = data.draw(st.sampled_from(replicas))
        numbers = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
        event: KvEvent
        if data.draw(st.booleans()):
            truth[one] |= set(numbers)
            event = stored(*numbers)
        else:
            truth[one] -= set(numbers)
            event = Removed(keys(*numbers))
        sequence[one] += 1
        fate = data.draw(st.sampled_from(["told", "told", "told", "dropped", "twice"]))
        for _ in range({"told": 1, "dropped": 0, "twice": 2}[fate]):
            if index.frame(one, frame(sequence[one], event)):
                index.snapshot(one, Snapshot(1, sequence[one], tuple((key, b"") for key in keys(*sorted(truth[one])))))
        if fate != "dropped":
            for number in range(7):
                assert bool(index.match(keys(number)).blocks(one)) == (number in truth[one])
