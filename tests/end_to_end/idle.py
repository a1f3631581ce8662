"""What the tests ask a running stack about itself."""

from __future__ import annotations

import asyncio

from bench import metrics_page, stack
from bench.metrics_page import RUNNING, WAITING, MetricsPage

ROOM_FOR_NOISE = 5.0  # machines that run tests are busy: a second of the promise may take five


def page(url: str) -> MetricsPage:
    return metrics_page.parse(stack.get_text(f"{url}/metrics"))


async def seconds_until_idle(url: str, timeout_s: float = ROOM_FOR_NOISE) -> float | None:
    """How long until nothing runs or waits; None: longer than `timeout_s`. Raises KeyError when the gauges are missing."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    while loop.time() - start_s < timeout_s:
        now = await asyncio.to_thread(page, url)
        if now.values[RUNNING] == 0 and now.values[WAITING] == 0:
            return loop.time() - start_s
        await asyncio.sleep(0.05)
    return None
