"""The stop waits for the routers' answer as long as it takes, and no longer than asked."""

from __future__ import annotations

import threading
import time

from cluster.deployment import finished


def test_an_answer_that_takes_longer_than_one_look_is_heard() -> None:
    def slow() -> bool:
        time.sleep(0.5)  # several looks
        return True

    assert finished(slow, lambda: False)
    assert not finished(lambda: False, lambda: False), "a router that was not idle in time says so"


def test_who_hurries_does_not_wait() -> None:
    release = threading.Event()
    assert not finished(lambda: release.wait(60), lambda: True)
    release.set()
