"""Looks at a server while it is measured: its /metrics, and the memory of its processes where they are known.

In a thread, and nothing is parsed before the run is over: the client's loop must not wait for it. A server that does not
answer /metrics costs the thread its patience and the run nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench import http_page, processes
from bench.processes import Process

FAILURES_MAX = 3  # in a row; then it has no /metrics
FIRST_PART = 1 / 16  # of the period: the first wait


@dataclass(frozen=True, slots=True)
class Sample:
    """None: not to be had."""

    time_s: float  # of time.perf_counter
    page: str | None
    memory_bytes: int | None


def waits_s(period_s: float) -> Iterator[float]:
    """Between samples: doubling up to the period, so that a run shorter than it is looked at too."""
    wait_s = FIRST_PART * period_s
    while True:
        yield wait_s
        wait_s = min(period_s, 2 * wait_s)


class Sampler:
    """`start`, `stop`; in between one sample every `period_s`, sooner at first, and one at either end."""

    def __init__(
        self,
        metrics_url: str | None,  # None: there is no one page to look at
        family: Callable[[], Sequence[Process]] | None = None,
        *,
        period_s: float = 1.0,
        memory_period_s: float = 5.0,
        timeout_s: float = 2.0,
    ) -> None:
        self._url = metrics_url
        self._family = family
        self._period_s = period_s
        self._memory_period_s = memory_period_s
        self._timeout_s = timeout_s
        self._failures = 0
        self._memory_due_s = float("-inf")
        self._over = threading.Event()
        self._samples: list[Sample] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self._look(memory=True)
        self._thread.start()

    def stop(self) -> tuple[Sample, ...]:
        self._over.set()
        self._thread.join(2 * self._timeout_s)
        self._look(memory=True)
        return tuple(self._samples)

    def _watch(self) -> None:
        for wait_s in waits_s(self._period_s):
            if self._over.wait(wait_s):
                return
            self._look(memory=time.perf_counter() >= self._memory_due_s)

    def _look(self, *, memory: bool) -> None:
        now_s = time.perf_counter()
        page = self._page()
        memory_bytes = None
        if memory and self._family is not None:
            self._memory_due_s = now_s + self._memory_period_s
            memory_bytes = sum(processes.proportional_memory_bytes(self._family()).values()) or None
        self._samples.append(Sample(now_s, page, memory_bytes))

    def _page(self) -> str | None:
        if self._url is None or self._failures >= FAILURES_MAX:
            return None
        try:
            page = http_page.fetch(self._url, self._timeout_s)
            if page.status == 200:
                self._failures = 0
                return page.body.decode("utf-8", "replace")
            self._failures += 1
        except (OSError, ValueError):
            self._failures += 1
        return None
