"""What a router does with the frames of one read is what it would have done with each of them."""

from __future__ import annotations

import msgspec

from replica.contract.messages import Bounce, BounceReason, Frame, KvEvent, Refused, Removed, Snapshot, Stored, TokenDelta, ToRouter
from router.gathering import gathered
from router.policy.incarnation import Incarnation
from router.policy.prefix_index import PrefixIndex
from tests.router.modelled_replica import ModelledReplica

R0 = Incarnation("r0", 1)
LOAD = ModelledReplica("r0").load()
KEYS = [bytes([number]) * 16 for number in range(8)]


def frame(progress: int, sequence: int, *events: KvEvent, tokens: int = 1, epoch: int = 1) -> Frame:
    load = msgspec.structs.replace(LOAD, progress=progress)
    deltas = tuple(TokenDelta(7, (100 * progress + i,)) for i in range(tokens))
    return Frame(epoch, sequence, load, deltas, (progress,), (Bounce(50 + progress, BounceReason.QUEUE_FULL),), events, int(bool(events)))


def stored(*numbers: int) -> Stored:
    return Stored(tuple(KEYS[number] for number in numbers), b"")


def test_frames_in_a_row_become_one_with_the_last_load_and_everything_in_order() -> None:
    row = [frame(1, 0), frame(2, 1, stored(0)), frame(3, 1, tokens=2), frame(4, 2, stored(1))]
    (one,) = gathered(row)
    assert isinstance(one, Frame)
    assert one.load.progress == 4
    assert [delta.token_ids for delta in one.deltas] == [(100,), (200,), (300,), (301,), (400,)]
    assert one.accepted == (1, 2, 3, 4)
    assert [bounce.attempt for bounce in one.bounces] == [51, 52, 53, 54]
    assert (one.events, one.batches, one.sequence) == ((stored(0), stored(1)), 2, 2)


def test_one_frame_is_itself() -> None:
    only = frame(1, 0)
    (one,) = gathered([only])
    assert one is only


def test_other_messages_keep_their_place() -> None:
    snapshot, refused = Snapshot(1, 1, ()), Refused("no")
    messages: list[ToRouter] = [frame(1, 0), frame(2, 0), snapshot, frame(3, 1, stored(0)), frame(4, 1), refused]
    found = gathered(messages)
    assert [type(one) for one in found] == [Frame, Snapshot, Frame, Refused]
    assert [one.load.progress for one in found if isinstance(one, Frame)] == [2, 4]


def test_what_was_missed_or_is_of_another_life_is_not_papered_over() -> None:
    missed = [frame(1, 1, stored(0)), frame(2, 3, stored(1))]  # number 2 never came
    assert gathered(missed) == missed
    lives = [frame(1, 1, stored(0)), frame(2, 1, epoch=2)]
    assert gathered(lives) == lives


def test_the_index_learns_the_same_and_asks_for_the_same_snapshots() -> None:
    rows = (
        [frame(1, 1, stored(0, 1)), frame(2, 2, Removed((KEYS[1],))), frame(3, 3, stored(2))],
        [frame(1, 1, stored(0)), frame(2, 1), frame(3, 1)],
        [frame(1, 2, stored(0)), frame(2, 3, stored(1))],  # something was missed before
        [frame(1, 1, stored(0)), frame(2, 3, stored(1))],  # and in between
        [frame(1, 0), frame(2, 1, stored(3)), frame(3, 1, stored(4))],  # a repetition
    )
    for row in rows:
        told: list[tuple[bool, list[int]]] = []
        for frames in (row, gathered(list(row))):
            index = PrefixIndex(1 << 20)
            index.add(R0)
            index.snapshot(R0, Snapshot(1, 0, ()))
            wants = [index.frame(R0, one) for one in frames if isinstance(one, Frame)]
            told.append((any(wants), [index.match([key]).longest for key in KEYS]))
        assert told[0] == told[1], row
