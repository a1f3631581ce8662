"""What a replica says of its own step times on /metrics, read every second while it is loaded, and its twin for the simulator.

The step time of a machine wanders: in a busy second steps take twice as long as in the next, and a queue that builds up in ten slow
seconds decides what the slowest requests wait. So the twin's steps cost, in every second, what the replica had fitted by its beginning
times by how much that second's steps exceeded it. Only every other second is told to the twin; it takes each of the others to be like
the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from bench.simulator.cost import Profile, scaled
from bench.simulator.course import Course
from replica.contract.messages import StepTimeCoefficients
from replica.contract.step_time import predict_step_s


@dataclass(frozen=True, slots=True)
class Reading:
    """At `at_s` after the load began."""

    at_s: float
    profile: Profile
    busy_s: float
    foreseen_s: float


@dataclass(frozen=True, slots=True)
class Twin:
    """A simulated replica that costs what the real one did."""

    profile: Profile  # with what the replica believed of its steps at first
    course: Course

    def usual_s(self, prompt_tokens: int) -> tuple[float, ...]:
        """How long a step of a usual shape took in each stretch: it prefills one prompt beside four decodes of such contexts."""
        return tuple(
            predict_step_s(
                k,
                prefill_tokens=prompt_tokens,
                decodes=4,
                context_tokens=5 * prompt_tokens,
                prefill_context=prompt_tokens * prompt_tokens // 2,
            )
            for k in self.course.step_times
        )


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
        busy_s=others["rantang:replica_busy_seconds_total"],
        foreseen_s=others["rantang:replica_foreseen_seconds_total"],
    )


def twin(readings: Sequence[Reading]) -> Twin:
    """`readings`: at least two, in order."""
    told = list(pairwise(readings))[::2]
    return Twin(
        profile=readings[0].profile,
        course=Course(
            starts_s=tuple(before.at_s for before, _ in told),
            step_times=tuple(_cost(before, after) for before, after in told),
        ),
    )


def _cost(before: Reading, after: Reading) -> StepTimeCoefficients:
    """Of the steps between them: as fitted until then, and by what they took more or less than that."""
    foreseen_s = after.foreseen_s - before.foreseen_s
    return scaled(before.profile.step_time, (after.busy_s - before.busy_s) / foreseen_s if foreseen_s > 0 else 1.0)
