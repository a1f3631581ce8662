"""A burst far above capacity is bounded and answered; and SIGTERM leaves nothing behind.

By its name this file runs before those that share the large stack: two stacks at once on two cores would measure each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench import processes, stack
from bench.drills import overload
from bench.record import Outcome
from bench.stack import Stack
from tests.end_to_end.idle import ROOM_FOR_NOISE, seconds_until_idle

pytestmark = [pytest.mark.cluster, pytest.mark.alone]


@pytest.fixture(scope="module")
def small() -> Iterator[Stack]:
    running = stack.start(overload.SERVE)
    yield running
    running.stop()


async def test_a_burst_is_served_or_refused_and_the_accepted_keep_the_slo(small: Stack) -> None:
    outcome = await overload.run(small.url)
    completed, shed = outcome.of(Outcome.COMPLETED), outcome.of(Outcome.SHED)
    assert len(completed) + len(shed) == overload.REQUESTS, [record.problems for record in outcome.records if record.problems]
    assert completed, "how many fit depends on the machine; the drill asks for its 8 on a quiet one"
    assert shed, "160 requests fit in no 2 s here: without a refusal nothing was tested"
    assert outcome.without_retry_after == 0
    assert "" not in outcome.reasons
    queue_time_s, refusal_ms = outcome.queue_time_p95_s, outcome.refusal_p95_ms
    assert queue_time_s is not None and queue_time_s <= overload.SLO_S * ROOM_FOR_NOISE
    assert refusal_ms is None or refusal_ms <= overload.REFUSAL_BOUND_MS * ROOM_FOR_NOISE * 2
    assert await seconds_until_idle(small.url) is not None


def test_sigterm_leaves_no_process(small: Stack) -> None:
    family = small.processes()
    assert {"router", "replica", "ray", "driver"} <= {process.role for process in family}
    assert small.stop() == []
    assert processes.alive(family) == []
    assert small.child.returncode == 0
