"""Negative controls: a router whose breaker opens for what a client asked, or for a full queue."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from replica.contract.messages import Bounce
from router.effects import Effect
from router.policy.incarnation import Incarnation
from router.traffic import Traffic
from tests.router import test_admission_overload

bounced = Traffic.bounced


def every_refusal_is_a_failure(self: Traffic, incarnation: Incarnation, bounce: Bounce, now: float) -> list[Effect]:
    effects = bounced(self, incarnation, bounce, now)
    self._fleet.lose(incarnation.replica_id)
    return effects


@pytest.mark.parametrize(
    "test",
    [
        test_admission_overload.test_client_errors_count_against_no_replica,
        test_admission_overload.test_back_pressure_is_neutral_and_bounded,
    ],
    ids=["client-errors", "back-pressure"],
)
def test_without_the_guard_its_test_fails(test: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Traffic, "bounced", every_refusal_is_a_failure)
    with pytest.raises(AssertionError):
        test()
