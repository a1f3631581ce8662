"""The baselines by hand-made fleets: each rule, where it differs from the others, and the names of all."""

from typing import get_args

import pytest

from router.config import RouterConfig
from router.policy.forecast import Forecast
from router.policy.incarnation import Incarnation
from router.policy.load import Lease, ReplicaView
from router.policy.policies import POLICIES, PolicyName, policy_named
from router.policy.request_view import RequestView
from router.policy.scoring import Candidate
from tests.router.policy.replica_views import view

PROMPT = 1000
REQUEST = RequestView(PROMPT, (), 10)


def candidate(name: str, *, cached: int = 0, requests: int = 0, seen: ReplicaView | None = None) -> Candidate:
    new = PROMPT - cached
    forecast = Forecast(0.0, 0.1, 0.1, 0.01, 0.01, new, float(new), cached, 0, 7, requests + 1, 0.1)
    return Candidate(Incarnation(name, 1), forecast, seen or view(name), 1.0, True, False, tiebreak=int(name[1:]))


def picks(policy: PolicyName, *fleet: Candidate, times: int = 1, seed: int = 1) -> list[str]:
    chooser = policy_named(policy, seed)
    return [chooser.choose(REQUEST, fleet, 0.0).incarnation.replica_id for _ in range(times)]


def test_names_in_the_configuration_are_the_policies() -> None:
    assert get_args(PolicyName) == POLICIES
    for name in POLICIES:
        assert picks(RouterConfig(policy=name).policy, candidate("r0")) == ["r0"]


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_replicas_share_the_work_and_a_seed_repeats_itself(policy: PolicyName) -> None:
    fleet = [candidate(f"r{i}") for i in range(4)]
    drawn = picks(policy, *fleet, times=200)
    assert set(drawn) == {"r0", "r1", "r2", "r3"}
    assert drawn == picks(policy, *fleet, times=200)


def test_round_robin_takes_turns_and_goes_on_when_one_is_gone() -> None:
    fleet = [candidate(f"r{i}") for i in range(3)]
    assert picks("round_robin", *fleet, times=4) == ["r0", "r1", "r2", "r0"]
    chooser = policy_named("round_robin", 1)
    chooser.choose(REQUEST, fleet, 0.0)
    assert chooser.choose(REQUEST, [fleet[0], fleet[2]], 0.0).incarnation.replica_id == "r2"


def test_least_requests_and_power_of_two_see_requests_only() -> None:
    fleet = [candidate("r0", cached=900, requests=5), candidate("r1", requests=1), candidate("r2", requests=3)]
    assert picks("least_requests", *fleet) == ["r1"]
    drawn = picks("power_of_two", *fleet, times=300)
    assert drawn.count("r0") == 0, "it loses every pair"
    assert drawn.count("r1") > drawn.count("r2") > 60


def test_longest_prefix_is_blind_for_load() -> None:
    fleet = [candidate("r0", cached=96, requests=500), candidate("r1", cached=80)]
    assert picks("longest_prefix", *fleet) == ["r0"]


def test_sglang_follows_a_match_above_three_tenths_unless_the_loads_are_far_apart() -> None:
    near = candidate("r0", cached=304, requests=64)
    assert picks("sglang_cache_aware", near, candidate("r1")) == ["r0"]
    assert picks("sglang_cache_aware", candidate("r0", cached=304, requests=65), candidate("r1")) == ["r1"], "65 against 0"
    busy = [candidate("r0", cached=304, requests=300), candidate("r1", requests=201)]
    assert picks("sglang_cache_aware", *busy) == ["r0"], "a difference of 99, but not half as many again"


def test_without_a_match_the_smallest_tree_gets_it() -> None:
    fleet = [candidate("r0", cached=90), candidate("r1", cached=0)]
    drawn = picks("ray_prefix", *fleet, times=20)  # r0 gains 910 a time, r1 1,000
    assert 9 <= drawn.count("r0") <= 11
    assert picks("sglang_cache_aware", *fleet, candidate("r2", requests=1), times=20).count("r2") == 0, "there: the fewest requests"


def test_ray_follows_a_match_of_a_tenth_whatever_the_loads() -> None:
    fleet = [candidate("r0", cached=112, requests=400), candidate("r1")]
    assert picks("ray_prefix", *fleet) == ["r0"]
    assert picks("sglang_cache_aware", *fleet) == ["r1"]
    equal = [candidate("r0", cached=112, requests=4), candidate("r1", cached=112, requests=2), candidate("r2")]
    assert picks("ray_prefix", *equal, times=10) == ["r1"] * 10, "of two equal matches the one with fewer requests"


def test_llmd_weighs_prefix_queue_and_kv() -> None:
    assert picks("llmd_weights", candidate("r0", cached=500), candidate("r1")) == ["r0"]
    # 3 × 0.5 for the prefix against 2 × 1 for the shortest queue
    assert picks("llmd_weights", candidate("r0", cached=500, seen=view("r0", waiting=3)), candidate("r1")) == ["r1"]
    assert picks("llmd_weights", candidate("r0", cached=700, seen=view("r0", waiting=3)), candidate("r1")) == ["r0"]
    assert picks("llmd_weights", candidate("r0", cached=100, seen=view("r0", free=700)), candidate("r1")) == ["r1"]


def test_dynamo_adds_what_is_to_prefill_and_what_is_held() -> None:
    assert picks("dynamo_cost", candidate("r0", cached=400), candidate("r1")) == ["r0"]
    assert picks("dynamo_cost", candidate("r0", cached=400, seen=view("r0", context=500)), candidate("r1")) == ["r1"]
    assert picks("dynamo_cost", candidate("r0", cached=400, seen=view("r0", context=300)), candidate("r1")) == ["r0"]


def test_lmetric_multiplies_tokens_and_requests() -> None:
    # (1000 − 500) × 3 against 1000 × 1
    assert picks("lmetric", candidate("r0", cached=500, requests=2), candidate("r1")) == ["r1"]
    assert picks("lmetric", candidate("r0", cached=500), candidate("r1")) == ["r0"]
    assert picks("lmetric", candidate("r0", cached=500, seen=view("r0", queued=600)), candidate("r1")) == ["r1"]


def test_what_was_sent_and_is_not_reported_yet_counts() -> None:
    pending = view("r0")
    pending.lease(Lease(1, new_tokens=600, context_tokens=600, blocks=38, dispatched_s=0.0))
    for policy in ("lmetric", "dynamo_cost"):  # 600 tokens more than the prefix saves
        assert picks(policy, candidate("r0", cached=500, seen=pending), candidate("r1")) == ["r1"], policy
