"""A replica is killed, then one is frozen, under 24 streams: none lost, no text changed, no token doubled."""

from __future__ import annotations

import asyncio

import pytest

from bench.drills import failover
from bench.record import RequestRecord
from bench.stack import Stack
from tests.end_to_end.idle import ROOM_FOR_NOISE

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.slow]

OUTPUT_TOKENS = 40  # of each stream: 10 before the fault, and enough after it that all are moved while they run


@pytest.fixture(scope="module")
def undisturbed(served: Stack) -> list[RequestRecord]:
    """Of both faults: the same streams on the same stack."""
    return asyncio.run(failover.undisturbed(served.url, OUTPUT_TOKENS))


@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_streams_survive(served: Stack, undisturbed: list[RequestRecord], how: str) -> None:
    outcome = await failover.disturb(served, how, undisturbed, OUTPUT_TOKENS)
    assert outcome.tokens_before < failover.STREAMS * OUTPUT_TOKENS, "the fault came too late to test anything"
    assert outcome.lost_streams == {}
    assert outcome.doubled == 0
    assert [difference for difference in outcome.differences if not difference.excused] == []
    assert outcome.moved_after_s is not None, "nothing moved"
    assert outcome.moved_after_s < failover.MOVED_BOUND_S[how] * ROOM_FOR_NOISE
    assert outcome.replaced_after_s is not None, "no new replica came"
