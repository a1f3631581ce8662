"""The policies by their names in the configuration. All but the first are baselines for comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from router.policy.affinity_policies import LongestPrefix, RayPrefix, SglangCacheAware
from router.policy.cost_policies import DynamoCost, LlmdWeights, LMetric
from router.policy.load_policies import AnyReplica, LeastRequests, PowerOfTwo, RoundRobin
from router.policy.scoring import LeastDelay, LeastTtft, Policy

PolicyName = Literal[
    "least_delay",
    "least_ttft",
    "random",
    "round_robin",
    "least_requests",
    "power_of_two",
    "longest_prefix",
    "sglang_cache_aware",
    "ray_prefix",
    "llmd_weights",
    "dynamo_cost",
    "lmetric",
]
_MAKERS: dict[PolicyName, Callable[[int], Policy]] = {
    "least_delay": LeastDelay,
    "least_ttft": LeastTtft,
    "random": AnyReplica,
    "round_robin": RoundRobin,
    "least_requests": LeastRequests,
    "power_of_two": PowerOfTwo,
    "longest_prefix": LongestPrefix,
    "sglang_cache_aware": SglangCacheAware,
    "ray_prefix": RayPrefix,
    "llmd_weights": LlmdWeights,
    "dynamo_cost": DynamoCost,
    "lmetric": LMetric,
}
POLICIES: tuple[PolicyName, ...] = tuple(_MAKERS)


def policy_named(name: PolicyName, seed: int) -> Policy:
    return _MAKERS[name](seed)
