"""What a replica says of its own step times on /metrics, read again and again while it is loaded, and its twin for the simulator.

The step time of a machine wanders: a moment's coefficients are not those of the load. The twin takes the mean of what was fitted,
by how much steps in all exceeded what was predicted of them, how much single ones vary, and how the fit wandered from reading to
reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from bench.simulator.cost import Profile, scaled
from bench.simulator.fault import Fault, FaultKind
from replica.contract.messages import StepTimeCoefficients
from replica.contract.step_time import predict_step_s

SPREAD_SIGMAS = 1.6  # a spread is twice the mean size of an error: so many standard deviations of a normal one
_GAP_S = 1e-3  # the end of one stretch comes before the next begins
_COEFFICIENTS = ("a", "b", "c", "d", "e")


@dataclass(frozen=True, slots=True)
class Reading:
    """At `at_s` after the first request of the load."""

    at_s: float
    profile: Profile
    spread: float
    busy_s: float
    foreseen_s: float


@dataclass(frozen=True, slots=True)
class Twin:
    """A simulated replica that costs what the real one did."""

    profile: Profile
    noise: float  # standard deviation of a step's time as a part of it
    drift: tuple[Fault, ...]  # the stretches between readings, each as slow as was fitted in it


def read(page: str, at_s: float) -> Reading:
    """The first replica's, from /metrics. Raises ValueError where it is not there."""
    times: dict[str, float] = {}
    limits: dict[str, float] = {}
    others: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "rantang:replica_step_time_seconds":
                times.setdefault(sample.labels["coefficient"], sample.value)
            elif sample.name == "rantang:replica_limit":
                limits.setdefault(sample.labels["limit"], sample.value)
            else:
                others.setdefault(sample.name, sample.value)
    if not times or not limits:
        raise ValueError("/metrics says nothing of a replica")
    profile = Profile(
        step_time=StepTimeCoefficients(**times),
        max_num_batched_tokens=int(limits["max_num_batched_tokens"]),
        max_num_seqs=int(limits["max_num_seqs"]),
        block_size=int(limits["block_size"]),
        pool_blocks=int(limits["num_blocks"]),
        max_model_len=int(limits["max_model_len"]),
        step_slo_s=limits.get("step_slo_s"),
    )
    return Reading(
        at_s=at_s,
        profile=profile,
        spread=others["rantang:replica_step_time_spread"],
        busy_s=others["rantang:replica_busy_seconds_total"],
        foreseen_s=others["rantang:replica_foreseen_seconds_total"],
    )


def twin(readings: Sequence[Reading], prompt_tokens: int) -> Twin:
    """`readings`: at least two, in order. `prompt_tokens`: the mean, of the step that tells how the fit wandered."""
    fitted = [one.profile.step_time for one in readings]
    mean = StepTimeCoefficients(*(sum(getattr(k, name) for k in fitted) / len(fitted) for name in _COEFFICIENTS))
    first, last = readings[0], readings[-1]
    foreseen_s = last.foreseen_s - first.foreseen_s
    bias = (last.busy_s - first.busy_s) / foreseen_s if foreseen_s > 0 else 1.0
    usual_s = _typical_s(mean, prompt_tokens)
    drift = [
        Fault(
            before.at_s,
            FaultKind.SLOW,
            lasts_s=max(0.0, after.at_s - before.at_s - _GAP_S),
            amount=_typical_s(after.profile.step_time, prompt_tokens) / usual_s,
        )
        for before, after in pairwise(readings)
    ]
    return Twin(
        profile=replace(last.profile, step_time=scaled(mean, bias)),
        noise=sum(one.spread for one in readings) / len(readings) / SPREAD_SIGMAS,
        drift=tuple(drift),
    )


def _typical_s(k: StepTimeCoefficients, prompt_tokens: int) -> float:
    """A step that prefills one prompt beside a few decodes of such contexts."""
    return predict_step_s(
        k,
        prefill_tokens=prompt_tokens,
        decodes=4,
        context_tokens=5 * prompt_tokens,
        prefill_context=prompt_tokens * prompt_tokens // 2,
    )
