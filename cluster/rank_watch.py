"""Whether a replica's ranks all live: each is asked five times a second. One that is lost takes the whole replica with it.

A tensor-parallel group cannot go on without a rank, and who waits inside a collective waits for its deadline. So the replica ends its
process instead: routers see the connection close and move its streams, Ray ends the other ranks, Serve starts a replica anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.rank_actors import RankActors, RankError, last_line

BEAT_S = 0.2
SILENCE_S = 5.0  # a rank answers from a thread that computes nothing, but a busy machine holds that up too; streams do not wait for it
SILENCE_LOADING_S = 15.0  # while weights are read, a thread may hold the interpreter for long


@dataclass(slots=True)
class Listening:
    """How long each rank has said nothing, in beats of ours: if we ourselves are held up, no rank is blamed for it."""

    silent_beats: list[int] = field(default_factory=list)

    def heard(self, answered: Sequence[bool], silence_s: float) -> str:
        """One beat later: who has answered since the last one. Why the group is lost, or ''."""
        self.silent_beats = self.silent_beats or [0] * len(answered)
        self.silent_beats = [0 if one else beats + 1 for one, beats in zip(answered, self.silent_beats, strict=True)]
        for rank, beats in enumerate(self.silent_beats, start=1):
            if beats * BEAT_S >= silence_s:
                return f"rank {rank} has not answered for {beats * BEAT_S:.1f} s: frozen, or its node is gone"
        return ""


class RankWatch:
    """`lost()` returns once a rank is gone, or the engine says of itself that it is; with the reason."""

    def __init__(self, ranks: RankActors) -> None:
        self._ranks = ranks
        self.silence_s = SILENCE_LOADING_S
        self.engine_fault: Callable[[], str] = lambda: ""  # why the engine will make no progress any more, '' while it may

    async def lost(self) -> str:
        listening = Listening()
        asked: list[Any] = [None] * len(self._ranks.actors)
        while True:
            try:
                self._ranks.check()
                answered = [self._answered(rank, asked) for rank in range(1, len(asked) + 1)]
            except RankError as error:
                return str(error)
            reason = listening.heard(answered, self.silence_s) or self.engine_fault()
            if reason:
                return reason
            await asyncio.sleep(BEAT_S)

    def _answered(self, rank: int, asked: list[Any]) -> bool:
        """Asks again if there was an answer. An actor that has not come up yet is not silent: Ray may still be placing it."""
        pending = asked[rank - 1]
        if pending is None or pending.done():
            if pending is not None:
                if pending.exception() is not None:
                    raise RankError(f"rank {rank} is gone: {last_line(pending.exception())}")
                self._ranks.whereabouts[rank] = pending.result()
            asked[rank - 1] = self._ranks.actors[rank - 1].beat.remote().future()
            return True
        return rank not in self._ranks.whereabouts
