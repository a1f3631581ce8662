"""`kill -9` of the command itself: nothing can drain then, but nothing may survive either. The last test of its stack."""

from __future__ import annotations

import time

import pytest

from bench import processes
from bench.stack import Stack

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.slow]

GONE_WITHIN_S = 60.0


def test_a_killed_command_leaves_no_process(served: Stack) -> None:
    family = served.processes()
    assert {"router", "replica", "ray", "driver"} <= {process.role for process in family}
    assert len(family) > 8
    served.child.kill()
    served.child.wait(GONE_WITHIN_S)
    deadline_s = time.monotonic() + GONE_WITHIN_S
    while processes.alive(family) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    assert processes.alive(family) == []
