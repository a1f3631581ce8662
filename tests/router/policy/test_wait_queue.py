"""The queue at the router: deadline order in a lane, fair turns between lanes, sums that are what the entries say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.policy import queue as queue_module
from router.policy.classes import Slo
from router.policy.queue import Waiting, WaitQueue
from router.policy.request_view import RequestView


def waiting(number: int, *, tenant: str = "", kind: str = "standard", slo_s: float = 10.0, tokens: int = 100, at_s: float = 0.0) -> Waiting:
    view = RequestView(tokens, (), 10, tenant=tenant, request_class=kind)
    return Waiting(number, view, at_s, Slo(slo_s), service_s=tokens / 1000, new_tokens=tokens)


def served(queue: WaitQueue, count: int, first: tuple[str, ...] = ()) -> list[Waiting]:
    taken = []
    for _ in range(count):
        head = queue.head(first)
        if head is None:
            break
        assert queue.head(first) is head, "asked again, the answer is the same"
        queue.remove(head.batch_id, served=True)
        taken.append(head)
    return taken


def test_one_tenant_is_served_by_deadline() -> None:
    queue = WaitQueue(10, 10_000)
    for number, slo_s in ((1, 5.0), (2, 1.0), (3, 3.0), (4, 1.0)):
        queue.add(waiting(number, slo_s=slo_s))
    assert [one.batch_id for one in served(queue, 9)] == [2, 4, 3, 1]
    assert (queue.depth, queue.tokens, queue.work_s, len(queue)) == (0, 0, 0.0, 0)


@pytest.mark.parametrize(("weights", "sizes"), [((1.0, 1.0), (100, 2000)), ((1.0, 3.0), (300, 300)), ((1.0, 0.1), (500, 50))])
def test_turns_divide_uncached_tokens_by_weight(weights: tuple[float, float], sizes: tuple[int, int]) -> None:
    by_name = dict(zip("ab", weights, strict=True))
    queue = WaitQueue(100_000, 10**9, by_name.__getitem__)
    for number in range(4000):
        queue.add(waiting(2 * number, tenant="a", tokens=sizes[0]))
        queue.add(waiting(2 * number + 1, tenant="b", tokens=sizes[1]))
    tokens: Counter[str] = Counter()
    while tokens.total() < 200_000:
        (one,) = served(queue, 1)
        tokens[one.view.tenant] += one.new_tokens
    assert tokens["b"] / tokens["a"] == pytest.approx(weights[1] / weights[0], rel=0.1)


def test_without_turns_the_earlier_flood_would_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def flood_then_one() -> int:
        queue = WaitQueue(1000, 10**9)
        for number in range(100):
            queue.add(waiting(number, tenant="a", tokens=2000))
        queue.add(waiting(100, tenant="b", at_s=1.0))
        return [one.view.tenant for one in served(queue, 101)].index("b")

    assert flood_then_one() <= 1
    monkeypatch.setattr(queue_module._Line, "turn", lambda self, yields: next(iter(self.lanes.values())))
    assert flood_then_one() == 100, "the control"


def test_those_who_exceed_their_share_come_after_the_others() -> None:
    queue = WaitQueue(100, 10**6)
    for number in range(6):
        queue.add(waiting(number, tenant="abc"[number % 3]))
    head = queue.head((), lambda tenant: tenant != "c")
    assert head is not None and head.view.tenant == "c"
    assert queue.head((), lambda tenant: True) is not None, "where all do, the turns decide"


def test_classes_go_by_deadline_but_one_behind_its_floor_goes_first() -> None:
    queue = WaitQueue(100, 10**6)
    queue.add(waiting(1, kind="batch", slo_s=600.0))
    queue.add(waiting(2, kind="interactive", slo_s=2.0, at_s=50.0))
    head = queue.head()
    assert head is not None and head.batch_id == 2
    head = queue.head(("batch",))
    assert head is not None and head.batch_id == 1
    queue.add(waiting(3, kind="interactive", slo_s=2.0, at_s=700.0))
    assert [one.batch_id for one in served(queue, 3)] == [2, 1, 3], "its deadline comes at last"


def test_what_comes_before() -> None:
    queue = WaitQueue(1000, 10**9)
    for number in range(10):
        queue.add(waiting(number, tenant="a", tokens=1000, at_s=float(number)))
    assert queue.ahead_s("standard", "a", 13.5) == pytest.approx(4.0)
    assert queue.ahead_s("standard", "a", 1e9) == pytest.approx(10.0)
    assert queue.ahead_s("standard", "b", 1e9) == 0.0, "its first turn comes at once"
    queue.add(waiting(10, tenant="b", tokens=1000, at_s=0.0))
    assert queue.ahead_s("standard", "b", 1e9) == pytest.approx(2.0), "its own, and as much of the other's"
    assert queue.ahead_s("interactive", "a", 9.0) == 0.0
    assert queue.ahead_s("interactive", "a", 13.5) == pytest.approx(5.0), "of another class, the earlier deadlines"


def test_what_a_sweep_costs_does_not_grow_with_classes_and_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in looks at a deadline; so is one question of an arrival."""
    looks = 0
    deadline_s = Waiting.deadline_s.fget
    assert deadline_s is not None

    def counted(one: Waiting) -> float:
        nonlocal looks
        looks += 1
        return float(deadline_s(one))

    def cost(classes: int, tenants: int) -> tuple[int, int]:
        nonlocal looks
        queue = WaitQueue(2_000, 10**9)
        for number in range(1024):
            queue.add(waiting(number, kind=f"c{number % classes}", tenant=f"t{number // classes % tenants}", slo_s=1.0 + number * 37 % 500))
        looks = 0
        assert sum(1 for _ in queue.with_ahead_s()) == 1024
        sweep, looks = looks, 0
        queue.ahead_s("c0", "t0", 100.0)
        return sweep, looks

    monkeypatch.setattr(Waiting, "deadline_s", property(counted))
    assert max(cost(8, 100)[0], cost(2, 100)[0], cost(1, 1)[0]) <= 2 * 1024
    assert cost(8, 100)[1] <= 8 * 2 * 10


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "serve", "cancel"]),
        st.sampled_from("abc"),
        st.sampled_from(["standard", "batch"]),
        st.integers(1, 5000),
        st.floats(0.001, 600.0),
    ),
    max_size=80,
)


WEIGHTS = {"a": 1.0, "b": 0.01, "c": 1000.0}


def summed(held: Iterable[Waiting], one: Waiting) -> float:
    """What comes before it, counted batch by batch."""
    before = [other for other in held if (other.deadline_s, other.batch_id) < (one.deadline_s, one.batch_id)]
    kind, tenant = one.view.request_class, one.view.tenant
    own_s = sum(other.service_s for other in before if (other.view.request_class, other.view.tenant) == (kind, tenant))
    rivals = [other for other in held if other.view.request_class == kind and other.view.tenant != tenant]
    weight = sum(WEIGHTS[name] for name in {other.view.tenant for other in rivals})
    between_s = min(sum(other.service_s for other in rivals), own_s * weight / WEIGHTS[tenant])
    return between_s + own_s + sum(other.service_s for other in before if other.view.request_class != kind)


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
@example([("add", "a", "standard", 1, 1.0)] * 4 + [("add", "a", "standard", 1, 1.5), ("add", "a", "standard", 1, 0.5)])  # equal deadlines
def test_sums_are_what_the_entries_say_and_bounds_hold(actions: list[tuple[str, str, str, int, float]]) -> None:
    queue = WaitQueue(20, 40_000, WEIGHTS.__getitem__)
    held: dict[int, Waiting] = {}
    for number, (what, tenant, kind, tokens, slo_s) in enumerate(actions):
        if what == "add":
            one = waiting(number, tenant=tenant, kind=kind, slo_s=slo_s, tokens=tokens, at_s=float(number))
            if queue.has_room(one.view):
                queue.add(one)
                held[number] = one
        elif what == "serve":
            head = queue.head()
            assert (head is None) == (not held)
            if head is not None:
                same_lane = [
                    one for one in held.values() if (one.view.tenant, one.view.request_class) == (head.view.tenant, head.view.request_class)
                ]
                assert head.deadline_s == min(one.deadline_s for one in same_lane)
                assert queue.remove(head.batch_id, served=True) and not queue.remove(head.batch_id)
                del held[head.batch_id]
        elif held:
            victim = sorted(held)[tokens % len(held)]
            assert queue.remove(victim)
            del held[victim]
        assert queue.depth == len(held) == len(queue) <= 20
        assert queue.tokens == sum(one.view.all_tokens for one in held.values()) <= 40_000
        assert queue.work_s == pytest.approx(sum(one.service_s for one in held.values()), abs=1e-6)
        assert {one.batch_id for one, _ in queue.with_ahead_s()} == set(held)
        for one, ahead_s in queue.with_ahead_s():
            others_s = sum(other.service_s for other in held.values()) - one.service_s
            assert -1e-6 <= ahead_s <= others_s + 1e-6
            if sum(other.deadline_s == one.deadline_s for other in held.values()) == 1:  # of equals, some come before and some after
                asked_s = queue.ahead_s(one.view.request_class, one.view.tenant, math.nextafter(one.deadline_s, 0.0))
                assert ahead_s == pytest.approx(asked_s, abs=1e-6), "one by one it is the same"
            assert ahead_s == pytest.approx(summed(held.values(), one), abs=1e-6)
