"""A few threads for text work, so that a long prompt never holds up other streams. Bounded in running and in waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from router.api.errors import ApiError
from router.api.limits import TEXT_JOBS_RUNNING_MAX, TEXT_JOBS_WAITING_MAX

Result = TypeVar("Result")


class TextPool:
    __slots__ = ("_executor", "_jobs", "_jobs_max")

    def __init__(self, running_max: int = TEXT_JOBS_RUNNING_MAX, waiting_max: int = TEXT_JOBS_WAITING_MAX) -> None:
        self._executor = ThreadPoolExecutor(running_max, thread_name_prefix="router-text")
        self._jobs = 0
        self._jobs_max = running_max + waiting_max

    async def run(self, job: Callable[[], Result], *, is_short: bool = False) -> Result:
        """`job()` on a thread, or at once if it is short: then handing it over would cost more. Raises ApiError 429 when too many wait."""
        if is_short:
            return job()
        if self._jobs >= self._jobs_max:
            raise ApiError(429, "too many prompts wait to be tokenized", code="text_queue_full", retry_after_s=1.0)
        self._jobs += 1
        future = asyncio.get_running_loop().run_in_executor(self._executor, job)
        future.add_done_callback(self._done)  # not in a finally: a cancelled waiter's job still holds its thread
        return await future

    def _done(self, future: asyncio.Future[Result]) -> None:
        self._jobs -= 1
