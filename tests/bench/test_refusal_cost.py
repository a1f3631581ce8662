"""What a refusal's cost is measured against: a mock that says it is full, so that a router refuses before it reads."""

import asyncio

import httpx
import pytest

from bench import refusal_cost, router_cost
from bench.record import Outcome, Refusal, RequestRecord
from bench.refusal_cost import Burst
from tests.bench.mocked_router import NEEDS_SMOLLM2, mocked_router


async def answers(*, is_full: bool) -> list[httpx.Response]:
    call = router_cost.plain(router_cost.id_prompts(1, 400, 2)[0])
    async with mocked_router(1, is_full=is_full) as (_, client):
        return list(await asyncio.gather(*(client.post(call.path, content=call.body) for _ in range(8))))


@NEEDS_SMOLLM2
async def test_a_full_mock_gets_nothing_to_do() -> None:
    told = await answers(is_full=True)
    assert {(one.status_code, one.json()["error"]["code"]) for one in told} == {(429, "queue_time")}
    assert {one.status_code for one in await answers(is_full=False)} == {200}, "the control: one that is not"


def test_only_refusals_at_arrival_are_counted() -> None:
    def shed(code: str) -> RequestRecord:
        body = b'{"error": {"message": "", "code": "%s"}}' % code.encode()
        return RequestRecord(0.0, 0.0, 0.004, 0.005, status=429, outcome=Outcome.SHED, refusal=Refusal(body=body))

    records = [shed("queue_time"), shed("queue_time"), shed("queue_full"), RequestRecord(0.0, outcome=Outcome.COMPLETED)]
    told = {one.name: one for one in refusal_cost.report([Burst(90.0, records), Burst(110.0, records[:2])], {}).metrics}
    assert told["otherwise_answered"].value == 2 and told["otherwise_answered"].holds is False
    assert told["cpu_per_refusal.p50"].value == told["cpu_per_refusal.least"].value == 90.0
    assert told["first_byte_p95.p50"].value == pytest.approx(4.0)
