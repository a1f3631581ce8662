"""Of many replicas a choice looks at a few, whatever their number (RTR-12): the longest hits and a sample."""

import pytest

from replica.contract.messages import Frame, Snapshot, Stored, Welcome
from router.policy import fleet as fleet_module
from router.policy.fleet import Fleet
from router.policy.request_view import RequestView
from tests.router.policy.replica_views import view

KEYS = tuple(bytes([i]) * 16 for i in range(6))
ASKED = RequestView(prompt_tokens=100, block_keys=KEYS, max_tokens=10)


def fleet_of(count: int) -> Fleet:
    fleet = Fleet(prefix_index_bytes_max=1 << 20, seed=1, now=0.0)
    for i in range(count):
        one = view(f"r{i}")
        incarnation = fleet.connect(Welcome(1, f"r{i}", 1, "m", "r", "f", one.limits, one.load), 0.0)
        assert incarnation is not None
    return fleet


@pytest.mark.parametrize(("count", "scored"), [(4, 4), (16, 16), (64, 16), (1024, 16)])
def test_what_is_scored_does_not_grow_with_the_fleet(count: int, scored: int) -> None:
    fleet = fleet_of(count)
    found = fleet.outlays(ASKED, fleet.routable(), 0.0)
    assert len(found) <= scored
    assert len(found) >= scored // 2
    assert len(fleet.outlays(ASKED, fleet.routable(), 0.0, sample=False)) == count, "the control: all, where all are asked for"


def test_the_longest_hit_is_never_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_of(300)
    held = fleet.all()[277].view.incarnation
    fleet.index.snapshot(held, Snapshot(1, 0, ()))
    fleet.frame(held, Frame(1, 1, fleet.all()[277].view.load, events=(Stored(KEYS[:4], b""),), batches=1), 0.1)

    def is_asked() -> bool:
        return any(one.candidate.incarnation == held for one in fleet.outlays(ASKED, fleet.routable(), 0.2))

    assert all(is_asked() for _ in range(20))
    monkeypatch.setattr(fleet_module, "likely", lambda candidates, holders, count, random: random.sample(candidates, count))
    assert not all(is_asked() for _ in range(20)), "the control: by chance alone it would be"
