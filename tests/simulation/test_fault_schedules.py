"""A hundred seeded schedules of faults; `make sim` runs two thousand. And the controls: a guard switched off is found."""

import pytest

from bench.simulator.fault import FaultKind
from bench.simulator.schedule import broken_promises, draw, replay, run
from replica.departures import Departures
from router.dispatch import Dispatch
from router.policy.load import ReplicaView
from router.policy.prefix_index import PrefixIndex

SEEDS = 100


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_every_promise_holds_whatever_happens(first: int) -> None:
    broken = {replay(seed): found for seed in range(first, first + 10) if (found := broken_promises(seed))}
    assert not broken, broken


def test_the_seeds_cover_every_fault_both_replicas_and_several_routers() -> None:
    schedules = [draw(seed) for seed in range(SEEDS)]
    assert {fault.kind for one in schedules for fault in one.faults} == set(FaultKind)
    assert {one.setup.kv for one in schedules} == {"free", "production"}
    assert {one.setup.layout.routers for one in schedules} == {1, 2}


def test_the_faults_really_disturb() -> None:
    moves = refused = 0
    for seed in range(20):
        schedule = draw(seed)
        world = schedule.setup.world()
        world.run(schedule.requests, schedule.faults)
        moves += sum(site.board.traffic.tally.moves for site in world.sites)
        refused += sum(journey.rejected is not None for journey in world.journeys)
    assert moves > 10
    assert refused > 0


def test_a_failing_seed_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("bench.simulator.schedule.broken_promises", lambda seed: ["a token was lost"] if seed == 8 else [])
    assert run(7, 3) == 1
    said = capsys.readouterr().out
    assert "seed 8: a token was lost" in said
    assert "python -m bench.simulator.schedule --seed 8 --count 1" in said


def is_found(wanted: str, seeds: int) -> bool:
    return any(wanted in promise for seed in range(seeds) for promise in broken_promises(seed))


def test_tokens_that_a_move_repeats_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Dispatch.send

    def forgetful(self: Dispatch, index: int, *rest: object) -> object:
        kept, self.streams[index].emitted = self.streams[index].emitted, []
        effects = send(self, index, *rest)  # type: ignore[arg-type]
        self.streams[index].emitted = kept
        return effects

    monkeypatch.setattr(Dispatch, "send", forgetful)
    assert is_found("lost, doubled", 30)


def test_a_leaking_lease_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplicaView, "release", lambda self, attempt: None)
    assert is_found("leases are left", 3)


def test_a_leaking_hit_to_come_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixIndex, "settled", lambda self, incarnation, attempt: None)
    assert is_found("hits to come are left", 3)


def test_an_engine_that_forgets_a_cancel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Departures, "cancel", lambda self, request, defer: None)
    monkeypatch.setattr("bench.simulator.schedule._REST_S", 0.0)
    assert is_found("still holds", 60)
