"""A stream's end is told to its task, and nothing is done for one that waits no more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from router.api.delivery import Delivery
from router.api.outbox import Outbox
from router.ports import Delta


class Endless:
    """A run that fails at once when it is asked."""

    is_over = False
    choices = 0

    def __init__(self) -> None:
        self.asked = 0

    def listen(self, call: Callable[[], None]) -> None:
        self.call = call

    def take(self) -> Sequence[Delta]:
        self.asked += 1
        raise OSError("gone")


async def nobody(message: Any) -> None:
    pass


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_what_comes_after_the_task_was_cancelled_is_left(is_cancelled: bool) -> None:
    run: Any = Endless()
    delivery = Delivery(run, None, Outbox(nobody, lambda: None))  # type: ignore[arg-type]
    task = asyncio.create_task(delivery.until_over())
    await asyncio.sleep(0)
    if is_cancelled:
        task.cancel()
    await asyncio.sleep(0)
    run.call()
    run.call()
    with pytest.raises(asyncio.CancelledError if is_cancelled else OSError):
        await task
    assert run.asked == (0 if is_cancelled else 1)
