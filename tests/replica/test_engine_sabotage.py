"""Negative control of the random traces: break one rule of the engine, and they must notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test
from test_engine_stateful import EngineMachine

from replica import departures, making_room
from replica.departures import Departures
from replica.kv_manager import KvManager
from replica.plan import Plan, PlanBuilder
from replica.request import Request
from replica.roster import Roster
from replica.scheduler import Scheduler

Patch = pytest.MonkeyPatch


def a_block_is_leaked(patch: Patch) -> None:
    release = KvManager.release

    def forgetful(kv: KvManager, request: Request) -> None:
        request.blocks = request.blocks[:-1] if len(request.blocks) > 2 else request.blocks
        release(kv, request)

    patch.setattr(KvManager, "release", forgetful)


def a_block_is_published_before_it_is_written(patch: Patch) -> None:
    start = KvManager.start

    def early(kv: KvManager, request: Request, match: object) -> object:
        copy = start(kv, request, match)  # type: ignore[arg-type]
        computed, request.computed = request.computed, len(request.tokens)
        kv.publish(request)
        request.computed = computed
        return copy

    patch.setattr(KvManager, "start", early)


def a_preempted_request_loses_a_token(patch: Patch) -> None:
    preempt = Roster.preempt

    def lossy(roster: Roster, request: Request) -> None:
        preempt(roster, request)
        if request.output_ids:
            request.output_ids.pop()
            request.tokens.pop()

    patch.setattr(Roster, "preempt", lossy)


def an_end_is_told_twice(patch: Patch) -> None:
    end = Departures.end

    def twice(self: Departures, request: Request, *rest: object, **named: object) -> None:
        end(self, request, *rest, **named)  # type: ignore[arg-type]
        self.outbox.tokens(request, (), finish=departures.FinishReason.ABORT)

    patch.setattr(Departures, "end", twice)


def nobody_makes_room(patch: Patch) -> None:
    """Who has no page for its next token stands still for ever."""
    patch.setattr(making_room, "lacks_page", lambda request, block_size: False)


def nothing_is_planned_now_and_then(patch: Patch) -> None:
    plan = Scheduler.plan

    def lazy(scheduler: Scheduler, coefficients: object) -> Plan | None:
        found = plan(scheduler, coefficients)  # type: ignore[arg-type]
        return None if found is not None and found.step.step_id % 7 == 0 else found

    patch.setattr(Scheduler, "plan", lazy)


def a_plan_made_ahead_is_not_corrected(patch: Patch) -> None:
    patch.setattr(PlanBuilder, "catch_up", lambda builder: None)


class ServedMachine(EngineMachine):
    """The traces as an engine is mostly set up: what is broken shows after fewer of them."""

    @initialize(room=st.integers(80, 140), seqs=st.integers(3, 6), budget=st.integers(2, 70), ahead=st.booleans())
    def start(self, room: int, seqs: int, budget: int, ahead: bool) -> None:
        super().start(
            block=4,
            room=room,
            seqs=seqs,
            budget=budget,
            policy="fcfs",
            caching=True,
            batching="adaptive",
            chunked=True,
            slo_ms=200.0,
            threshold=0,
            poison=0,
            sanguine=True,
            ahead=ahead,
        )


@pytest.mark.parametrize(
    "sabotage",
    [
        a_block_is_leaked,
        a_block_is_published_before_it_is_written,
        a_preempted_request_loses_a_token,
        an_end_is_told_twice,
        nobody_makes_room,
        nothing_is_planned_now_and_then,
        a_plan_made_ahead_is_not_corrected,
    ],
    ids=lambda sabotage: sabotage.__name__,
)
def test_the_traces_notice(sabotage: Callable[[Patch], None], monkeypatch: Patch) -> None:
    sabotage(monkeypatch)
    quick = settings(
        max_examples=100,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        report_multiple_bugs=False,
        database=None,
        phases=(Phase.generate,),
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, ExceptionGroup, KeyError, IndexError)):
        run_state_machine_as_test(ServedMachine, settings=quick)  # type: ignore[no-untyped-call]
