import msgspec

from replica.contract.messages import Frame
from router.policy.fleet import Fleet
from router.policy.forecast import Forecast
from router.policy.incarnation import Incarnation
from router.policy.load import Lease, ReplicaView
from router.policy.request_view import RequestView
from tests.router.modelled_replica import ModelledReplica

R0 = Incarnation("r0", 1)


def view() -> ReplicaView:
    return ReplicaView(R0, ModelledReplica("r0").welcome(), 0.0)


def lease(attempt: int, new: int = 100) -> Lease:
    return Lease(attempt, new_tokens=new, context_tokens=new, blocks=7, dispatched_s=0.0)


def test_an_attempt_counts_until_the_report_counts_it() -> None:
    one = view()
    one.lease(lease(1))
    one.lease(lease(2, new=50))
    assert (one.claims.requests, one.claims.new_tokens, one.claims.blocks) == (2, 150, 14)
    one.report(one.load, (1,), 0.1)
    assert (one.claims.requests, one.claims.new_tokens) == (1, 50)
    assert one.own == 2


def test_acceptance_may_come_twice_late_or_for_strangers() -> None:
    one = view()
    one.lease(lease(1))
    assert one.release(1) is not None
    one.report(one.load, (1, 1, 99), 0.1)
    assert (one.own, one.claims.requests) == (0, 0)
    assert one.release(1) is None


def test_only_an_untouched_replica_is_empty() -> None:
    one = view()
    assert one.is_empty
    one.lease(lease(1))
    assert not one.is_empty
    one.accept(1)
    assert not one.is_empty
    one.release(1)
    assert one.is_empty


def test_a_stale_report_is_judged_by_own_counts_when_they_are_more() -> None:
    one = view()
    for attempt in range(5):
        one.lease(lease(attempt))
        one.accept(attempt)
    assert one.requests(now=0.2) == 0, "the report is fresh and says none"
    assert one.is_stale(now=5.0)
    assert one.requests(now=5.0) == 5


def test_leases_go_with_their_incarnation() -> None:
    fleet = Fleet(prefix_index_bytes_max=1 << 20, seed=1, now=0.0)
    first = fleet.connect(ModelledReplica("r0").welcome(), 0.0)
    assert first is not None
    expected = Forecast(0, 0, 0, 0, 0.01, 100, 100.0, 0, 0, 7, 1, 0.01)
    fleet.lease(first, 1, RequestView(100, (b"k" * 16,), 10), expected, 0.0)
    second = fleet.connect(ModelledReplica("r0", epoch=2).welcome(), 1.0)
    assert second is not None
    known = fleet.get(second)
    assert known is not None
    assert known.view.own == 0
    fleet.release(first, 1, 1.0)
    assert known.view.own == 0
    assert fleet.get(first) is None
    assert fleet.index.coming == 0
    late = Frame(epoch=1, sequence=0, load=known.view.load, accepted=(1,))
    assert fleet.frame(second, late, 1.0) is None, "a frame of the old life"


def test_the_first_step_of_an_idle_replica_begins_when_it_is_told_of() -> None:
    one = view()
    one.report(msgspec.structs.replace(one.load, running=1), (), 60.0)  # a long step is told of before it ends: no progress yet
    assert one.stepped_s == 60.0
    one.report(msgspec.structs.replace(one.load, waiting=1), (), 61.0)
    assert one.stepped_s == 60.0, "a heartbeat is no step"
