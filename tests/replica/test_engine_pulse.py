"""What the engine's thread says of itself while it works: a stall is never seen where there is none."""

from __future__ import annotations

import asyncio

import pytest
from link_fakes import PacedRunner, ScriptedEngine, request, until

from replica.engine_loop import Delivery, EngineLoop, Report


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_work_that_has_just_come_to_an_idle_engine_has_not_waited() -> None:
    """The thread has not woken yet, and the last progress was an hour ago."""
    clock = Clock()
    loop = EngineLoop(ScriptedEngine(), PacedRunner(), lambda _: None, clock=clock)  # not started: it never wakes
    loop.inbox.submit(1, request(1))
    clock.now_s += 3600.0
    assert loop.pulse().pending_work
    assert loop.pulse().waiting_s == 0.0
    clock.now_s += 5.0
    assert loop.pulse().waiting_s == pytest.approx(5.0)  # but a thread that does not wake is seen
    loop.inbox.cancel(1, 1)
    loop.inbox.take()
    assert not loop.pulse().pending_work
    await loop.stop()


@pytest.mark.parametrize(("predicted_s", "announced"), [(8.0, True), (0.01, False)])
async def test_a_long_step_is_announced_before_it_runs(predicted_s: float, announced: bool) -> None:
    """Routers allow four times what was predicted last: they must hear of it while it runs, with the attempts it counts."""
    heard: list[Delivery] = []
    engine, runner = ScriptedEngine(predicted_step_s=predicted_s), PacedRunner(gated=True)
    loop = EngineLoop(engine, runner, heard.append)
    loop.start()
    loop.inbox.submit(1, request(7, max_tokens=1))
    await asyncio.to_thread(runner.entered.acquire)
    await asyncio.sleep(0.05)
    reports = [each for each in heard if isinstance(each, Report)]
    assert len(reports) == int(announced)
    if announced:
        assert reports[0].load.predicted_step_s == predicted_s
        assert reports[0].accepted == ((1, 7),)
    runner.gate.release()
    await until(lambda: any(isinstance(each, Report) and each.deltas for each in heard))
    accepted = [key for each in heard if isinstance(each, Report) for key in each.accepted]
    assert accepted == [(1, 7)]  # once
    await loop.stop()
