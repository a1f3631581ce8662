"""Negative controls: with a guard of the link switched off, the test that stands for it must fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from replica import link, link_connection
from replica.engine_loop import Delivery, EngineLoop, Report
from replica.fanout import Fanout
from replica.inbox import Cancels, Inbox
from replica.link import LinkLimits
from tests.replica import link_fakes, test_link_handshake, test_link_stream

Test = Callable[[], Awaitable[None]]


def no_withdrawal(self: Inbox, owner: int, attempt: int) -> bool:
    with self.condition:
        self._cancels[owner, attempt] = None
    return True


original_send = EngineLoop._send


def only_steps_are_told(self: EngineLoop, delivery: Delivery) -> None:
    if not isinstance(delivery, Report) or delivery.deltas:
        original_send(self, delivery)


@pytest.mark.parametrize(
    ("owner", "name", "off", "test"),
    [
        (
            Inbox,
            "take_cancels",
            lambda self: Cancels(),
            lambda: test_link_stream.test_a_cancelled_request_costs_at_most_two_more_steps("cancel"),
        ),
        (Inbox, "cancel", no_withdrawal, test_link_stream.test_a_cancel_finds_a_request_that_the_engine_has_not_seen),
        (Inbox, "cancel_owner", lambda self, owner: None, test_link_stream.test_a_router_that_leaves_takes_only_its_own_work_along),
        (EngineLoop, "_send", only_steps_are_told, test_link_stream.test_load_is_zero_again_after_everything_is_aborted),
        (link, "HEARTBEAT_S", 3600.0, test_link_stream.test_an_idle_replica_reports_by_the_clock),
        (Fanout, "snapshot", lambda self, delivery: None, test_link_stream.test_a_snapshot_answers_a_gap_in_order),
        (Fanout, "is_empty", True, test_link_stream.test_draining_bounces_new_work_and_waits_for_the_old),
        (link_connection, "HELLO_BYTES_MAX", 1 << 30, test_link_handshake.test_an_oversized_frame_is_cut_before_it_is_read),
        (link_fakes, "LinkLimits", LinkLimits, test_link_handshake.test_no_hello_in_time_is_refused),
        (link_connection.RouterConnection, "cut", lambda self, reason: None, test_link_stream.test_a_router_that_does_not_read_is_cut),
    ],
    ids=[
        "late-cancels",
        "withdrawal",
        "disconnect",
        "report-without-step",
        "heartbeat",
        "snapshot",
        "drain",
        "hello-size",
        "deadline",
        "slow",
    ],
)
async def test_without_the_guard_its_test_fails(owner: object, name: str, off: object, test: Test, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, off)
    if owner is link_fakes:
        monkeypatch.setattr(test_link_handshake, "LinkLimits", lambda **_: LinkLimits())
    monkeypatch.setattr(link_fakes, "PATIENCE_S", 0.6)
    with pytest.raises((AssertionError, TimeoutError)):
        async with asyncio.timeout(1.5):
            await test()
