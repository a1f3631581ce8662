"""When a group counts as lost: a rank that ended, one that is silent for longer than a computing process ever is, an engine that stalls."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from cluster import rank_watch, replica_deployment
from cluster.rank_actors import RankError, Whereabouts
from cluster.rank_watch import BEAT_S, SILENCE_S, Listening, RankWatch


def test_a_rank_is_lost_when_it_is_silent_too_long_and_not_before() -> None:
    listening = Listening()
    beats = round(SILENCE_S / BEAT_S)
    assert [listening.heard([True, False], SILENCE_S) for _ in range(beats - 1)] == [""] * (beats - 1)
    assert listening.heard([True, False], SILENCE_S) == "rank 2 has not answered for 5.0 s: frozen, or its node is gone"


def test_an_answer_ends_the_silence() -> None:
    listening = Listening()
    for _ in range(5 * round(SILENCE_S / BEAT_S)):
        for answered in (False, False, True):
            assert listening.heard([answered], SILENCE_S) == ""


class Actor:
    """Answers `alive` times, then keeps silent."""

    def __init__(self, alive: int) -> None:
        self.alive = alive
        self.asked = 0
        self.beat = self

    def remote(self) -> Actor:
        return self

    def future(self) -> Future[Whereabouts]:
        answer: Future[Whereabouts] = Future()
        self.asked += 1
        if self.asked <= self.alive:
            answer.set_result(Whereabouts(1, None, "node", None))
        return answer


class Ranks:
    def __init__(self, *actors: Actor, ended: str = "") -> None:
        self.actors = list(actors)
        self.whereabouts: dict[int, Whereabouts] = {}
        self.ended = ended

    def check(self) -> None:
        if self.ended:
            raise RankError(self.ended)


def lost(ranks: Any, **changes: Any) -> str:
    async def watch() -> str:
        one = RankWatch(ranks)
        one.silence_s = 3 * rank_watch.BEAT_S
        for name, value in changes.items():
            setattr(one, name, value)
        return await asyncio.wait_for(one.lost(), 20)

    return asyncio.run(watch())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "BEAT_S", 0.01)


@pytest.mark.usefixtures("quick")
def test_what_takes_a_group_down() -> None:
    assert lost(Ranks(Actor(1000), Actor(2))).startswith("rank 2 has not answered")
    assert lost(Ranks(Actor(1000), ended="rank 1 failed: MemoryError")) == "rank 1 failed: MemoryError"
    faults = iter(["", "", "no progress for 1.6 s"])
    assert lost(Ranks(Actor(1000)), engine_fault=lambda: next(faults)) == "no progress for 1.6 s"


class Failing(Actor):
    """Its answer is an exception that says nothing."""

    def future(self) -> Future[Whereabouts]:
        answer: Future[Whereabouts] = Future()
        answer.set_exception(RuntimeError())
        return answer


@pytest.mark.usefixtures("quick")
def test_an_exception_without_a_word_is_named_by_its_class() -> None:
    assert lost(Ranks(Failing(0))) == "rank 1 is gone: RuntimeError"


class Undeployed(replica_deployment.Replica):
    """Without what Serve does at its end."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize("fault", [None, ValueError("of the watch"), ValueError()])
def test_a_watch_that_fails_ends_the_replica_too(monkeypatch: pytest.MonkeyPatch, fault: Exception | None) -> None:
    """Nobody would see the next loss. A watch that is cancelled, because the replica stops, ends nothing."""
    told: list[str] = []
    replica = object.__new__(Undeployed)
    monkeypatch.setattr(replica, "_give_up", told.append, raising=False)

    async def watched() -> None:
        async def ends() -> str:
            if fault is not None:
                raise fault
            return "rank 1 is gone"

        for cancelled in (True, False):
            task = asyncio.create_task(ends())
            task.add_done_callback(replica._watch_over)
            if cancelled:
                task.cancel()
            await asyncio.wait([task])
            await asyncio.sleep(0)

    asyncio.run(watched())
    said = (str(fault) or "ValueError") if fault is not None else ""
    assert told == ([f"the watch over the ranks failed: {said}"] if fault is not None else ["rank 1 is gone"])


def test_a_stall_ends_a_group_late_and_serve_no_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first step of its kind may take some seconds; the control: one that takes longer than LATE_S more is the end."""
    now = [0.0]
    monkeypatch.setattr(replica_deployment.time, "monotonic", lambda: now[0])

    class Stalled:
        def pulse(self) -> Any:
            return type("Pulse", (), {"alive": True, "reason": ""})

        def check_health(self) -> None:
            raise RuntimeError("no progress for 3 s")

    replica = object.__new__(Undeployed)
    replica._server, replica._ranks, replica._stalled_since_s = Stalled(), Ranks(), None  # type: ignore[assignment]
    for second in (1.0, 5.0, 9.5):
        now[0] = second
        assert replica._engine_fault() == ""
        replica.check_health()
    now[0] = 1.0 + replica_deployment.LATE_S + 0.1
    assert replica._engine_fault() == "no progress for 3 s"
    with pytest.raises(RankError, match="no progress for 3 s"):
        replica.check_health()


@pytest.mark.usefixtures("quick")
def test_a_rank_that_is_still_being_placed_is_not_silent() -> None:
    """The control: the same silence after a first answer is the end."""
    ticks = iter(range(50))
    assert lost(Ranks(Actor(0)), engine_fault=lambda: "" if next(ticks) < 40 else "waited long enough") == "waited long enough"
    assert lost(Ranks(Actor(1))).startswith("rank 1 has not answered")
