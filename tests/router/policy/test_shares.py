from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.policy.classes import Classes, ServiceClass, Slo, Terms
from router.policy.request_view import RequestView
from router.policy.shares import ACTIVE_S, HALF_LIFE_S, Shares
from router.policy.standing import Standing
from router.policy.tenants import Tenant, Tenants


def test_alone_nobody_exceeds_and_among_others_the_weight_decides() -> None:
    shares = Shares({"a": 1.0, "b": 3.0}.__getitem__)
    shares.charge("a", 1000, 0.0)
    assert not shares.exceeds("a", 0.0)
    shares.seen("b", 0.0)
    assert shares.exceeds("a", 0.0) and not shares.exceeds("b", 0.0)
    shares.charge("b", 2900, 0.0)
    assert shares.exceeds("a", 0.0), "a quarter is its share"
    shares.charge("b", 200, 0.0)
    assert not shares.exceeds("a", 0.0) and shares.exceeds("b", 0.0)


def test_use_is_forgotten_and_so_are_those_who_left() -> None:
    shares = Shares(lambda key: 1.0)
    shares.charge("a", 1000, 0.0)
    shares.charge("b", 600, HALF_LIFE_S)
    shares.seen("a", HALF_LIFE_S)
    assert shares.fraction("a", HALF_LIFE_S) == pytest.approx(500 / 1100)
    assert not shares.exceeds("a", HALF_LIFE_S)
    shares.seen("a", HALF_LIFE_S + ACTIVE_S + 1)
    assert len(shares) == 1 and shares.fraction("b", HALF_LIFE_S + ACTIVE_S + 1) == 0.0


@settings(max_examples=100, deadline=None)
@example([(0, 1.0, 0.0), (1, 1.0, 2.0), (2, 4.290870015877425e-119, 3411.0)])
@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1e6), st.floats(0, 10_000.0)), max_size=60))
def test_bounded_and_finite_whatever_comes(uses: list[tuple[int, float, float]]) -> None:
    shares = Shares(lambda key: 1.0 + len(key), keys_max=5)
    now = 0.0
    for key, amount, pause_s in uses:
        now += pause_s
        shares.charge(f"t{key}", amount, now)
        assert 1 <= len(shares) <= 5
        assert 0.0 <= shares.fraction(f"t{key}", now) <= 1.0 + 1e-9
    shares.seen("t0", now + 1e7)
    assert len(shares) == 1 and not shares.exceeds("t0", now + 1e7)


CLASSES = Classes(
    [ServiceClass("standard", Slo(10.0)), ServiceClass("interactive", Slo(2.0)), ServiceClass("batch", Slo(600.0), floor=0.2)]
)


def test_who_may_fill_the_queues_of_replicas() -> None:
    standing = Standing(CLASSES, lambda tenant: 1.0)
    assert not standing.depth(CLASSES["interactive"], CLASSES["interactive"].slo, 100, "", 0.0).is_lean
    assert standing.depth(CLASSES["standard"], CLASSES["standard"].slo, 100, "", 0.0).is_lean
    standing.charge("interactive", "", 1000, 0.0)
    standing.seen(CLASSES["batch"], "", 0.0)
    assert standing.behind(0.0) == ("batch",)
    deprived = standing.depth(CLASSES["batch"], CLASSES["batch"].slo, 100, "", 0.0)
    assert (deprived.depth_s, deprived.is_lean) == (2.0, False), "as deep as the tightest class can bear"
    standing.charge("batch", "", 1000, 0.0)
    assert standing.behind(0.0) == ()
    assert standing.depth(CLASSES["batch"], CLASSES["batch"].slo, 100, "", 0.0).is_lean


@pytest.mark.parametrize("promised_s", [2.1, 600.0])
def test_a_promise_of_its_own_changes_what_a_request_may_fill(promised_s: float) -> None:
    standing = Standing(CLASSES, lambda tenant: 1.0)
    assert standing.depth(CLASSES["interactive"], Slo(promised_s), 100, "", 0.0).is_lean, "it has the time"
    assert not standing.depth(CLASSES["interactive"], Slo(1.0), 100, "", 0.0).is_lean
    assert standing.depth(CLASSES["standard"], Slo(0.001), 100, "", 0.0).is_lean, "no header makes a class the tightest"


def test_who_asks_for_more_time_than_others_leaves_them_the_replicas_queues() -> None:
    standing = Standing(CLASSES, lambda tenant: 1.0)
    patient, hurried = Slo(2.0, 1.0, 0.001), Slo(2.0, 1.0)  # 1.1 s of a prompt of 100 tokens, and 1 s
    standing.asks(patient, 100, 0.0)
    assert not standing.depth(CLASSES["interactive"], patient, 100, "", 0.0).is_lean, "nobody asks for less"
    standing.asks(hurried, 100, 1.0)
    assert standing.depth(CLASSES["interactive"], patient, 100, "", 10.9).is_lean
    assert not standing.depth(CLASSES["interactive"], patient, 40, "", 10.9).is_lean, "almost the same is the same"
    assert not standing.depth(CLASSES["interactive"], hurried, 100, "", 10.9).is_lean
    assert not standing.depth(CLASSES["interactive"], patient, 100, "", 30.0).is_lean, "that was long ago"


def test_a_class_by_its_name_a_tier_or_none() -> None:
    assert [CLASSES.asked(name) for name in (None, "", "batch", "flex", "priority", "auto", "default")] == [
        "standard",
        "standard",
        "batch",
        "batch",
        "interactive",
        "standard",
        "standard",
    ]
    assert CLASSES.asked("gold") is None
    assert Classes([ServiceClass("standard", Slo(1.0))]).asked("flex") == "standard"


def test_a_header_replaces_one_promise() -> None:
    classes = Classes([ServiceClass("standard", Slo(10.0, 3.0, 0.001, 0.1))])
    assert classes.slo(Terms()).ttft_within_s(1000) == 4.0
    changed = classes.slo(Terms(ttft_slo_s=2.0, tpot_slo_s=0.5))
    assert (changed.queue_time_s, changed.ttft_within_s(1000), changed.tpot_s) == (10.0, 2.0, 0.5)
    assert classes.slo(Terms(queue_time_slo_s=1.0)) == Slo(1.0, 3.0, 0.001, 0.1)


def test_what_a_tenant_holds_is_given_back_once() -> None:
    tenants = Tenants({"a": Tenant(requests_max=2)})
    view = RequestView(10, (), 1, tenant="a")
    for batch_id in (1, 2):
        assert tenants.limit("a", view) is None
        tenants.enter(batch_id, view)
    assert tenants.limit("a", view) == "requests_max of 2"
    for _ in range(3):
        tenants.leave(1)
    assert tenants.limit("a", view) is None
    tenants.leave(2)
    assert len(tenants) == 0
    big = RequestView(10, (), 1, choices=9, tenant="a")
    assert tenants.limit("a", big) is None, "alone, even what is larger than the limit"
    assert tenants.limit("b", big) is None
