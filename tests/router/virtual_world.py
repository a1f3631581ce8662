"""The production switchboard under a virtual clock, with modelled replicas at the other end of instant links."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from replica.contract.blocks import block_keys, root_key
from replica.contract.messages import FinishReason, GenerateRequest, SamplingParams
from router.config import RouterConfig
from router.effects import CancelAttempt, Effect, Emit, Ended, Notice, Opened, Reject, Submit, WantSnapshot
from router.policy.incarnation import Incarnation
from router.ports import Batch, Delta
from router.switchboard import Switchboard
from tests.router.modelled_replica import ModelledReplica, token

ROOT = root_key(model="m", revision="r")
HEARTBEAT_S = 0.5


def request(name: str, prompt: tuple[int, ...], *, max_tokens: int = 40, choice: int = 0, seed: int = 1) -> GenerateRequest:
    return GenerateRequest(
        attempt=0,
        request_id=name,
        choice=choice,
        prompt_ids=prompt,
        block_keys=block_keys(ROOT, prompt, 16),
        sampling=SamplingParams(seed=seed, max_tokens=max_tokens),
    )


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    return tuple((seed * 1_000_003 + i * 17) % 50_000 for i in range(length))


@dataclass
class Outcome:
    """What the client of one batch heard."""

    batch_id: int
    batch: Batch
    opened: bool = False
    deltas: list[Delta] = field(default_factory=list)
    rejected: Reject | None = None
    rejected_s: float | None = None
    ended: bool = False

    def tokens(self, index: int = 0) -> list[int]:
        return [one for delta in self.deltas if delta.index == index for one in delta.token_ids]

    def finishes(self, index: int = 0) -> list[FinishReason]:
        return [delta.finish for delta in self.deltas if delta.index == index and delta.finish is not None]

    def expected(self, index: int = 0) -> list[int]:
        one = self.batch.requests[index]
        return [token(one, len(one.prompt_ids) + i) for i in range(one.sampling.max_tokens)]


class World:
    def __init__(self, config: RouterConfig, replicas: Iterable[ModelledReplica], seed: int = 1) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.board = Switchboard(config, seed=seed, now=0.0)
        self.replicas: dict[str, ModelledReplica] = {}
        self.incarnations: dict[str, Incarnation] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.first_s: dict[int, float] = {}  # batch → when its first token came
        self.notices: list[Notice] = []
        self.submits: list[tuple[str, GenerateRequest]] = []
        for replica in replicas:
            self.connect(replica)
        self.at(0.0, self._tick)

    # --- time --------------------------------------------------------------------------------------------------------

    def at(self, time_s: float, what: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (time_s, self._order, what))

    def run(self, until_s: float) -> None:
        while self._heap and self._heap[0][0] <= until_s:
            self.now, _, what = heapq.heappop(self._heap)
            what()
        self.now = until_s

    def _tick(self) -> None:
        self.carry_out(self.board.tick(self.now))
        self.at(self.now + self.board.tick_period_s, self._tick)

    # --- clients -----------------------------------------------------------------------------------------------------

    def arrive(self, *requests: GenerateRequest, slo_s: float | None = None) -> Outcome:
        batch = Batch(requests[0].request_id, tuple(requests), self.now, slo_s)
        batch_id, effects = self.board.arrive(batch, self.now)
        self.outcomes[batch_id] = Outcome(batch_id, batch)
        self.carry_out(effects)
        return self.outcomes[batch_id]

    # --- replicas ----------------------------------------------------------------------------------------------------

    def connect(self, replica: ModelledReplica) -> None:
        self.replicas[replica.replica_id] = replica
        incarnation, effects = self.board.connected(replica.welcome(), self.now)
        if incarnation is not None:
            self.incarnations[replica.replica_id] = incarnation
        self.carry_out(effects)
        self.at(self.now + HEARTBEAT_S, lambda: self._beat(replica))

    def kill(self, replica_id: str) -> None:
        self.replicas.pop(replica_id).dead = True
        self.carry_out(self.board.lost(replica_id, self.now))

    def freeze(self, replica_id: str) -> None:
        self.replicas[replica_id].frozen = True

    def thaw(self, replica: ModelledReplica) -> None:
        replica.frozen = False
        if replica.step is not None:
            self.at(max(self.now, replica.step.ends_s), lambda: self._end(replica))
        else:
            self._begin(replica)

    def _beat(self, replica: ModelledReplica) -> None:
        if replica.dead:
            return
        if not replica.frozen and replica.step is None:
            self._tell(replica, replica.frame())
        self.at(self.now + HEARTBEAT_S, lambda: self._beat(replica))

    def _begin(self, replica: ModelledReplica) -> None:
        if replica.dead or replica.frozen:
            return
        ends_s = replica.begin(self.now)
        if ends_s is not None:
            self.at(ends_s, lambda: self._end(replica))

    def _end(self, replica: ModelledReplica) -> None:
        if replica.dead or replica.frozen or replica.step is None or self.now < replica.step.ends_s:
            return
        frame = replica.end(self.now)
        self._begin(replica)
        self._tell(replica, frame)
        self._begin(replica)

    def _tell(self, replica: ModelledReplica, frame: object) -> None:
        self.carry_out(self.board.frame(self.incarnations[replica.replica_id], frame, self.now))  # type: ignore[arg-type]

    # --- effects -----------------------------------------------------------------------------------------------------

    def carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Submit):
            self.submits.append((effect.incarnation.replica_id, effect.request))
            replica = self.replicas[effect.incarnation.replica_id]
            replica.submit(effect.request, self.now)
            self.at(self.now, lambda: self._begin(replica))
        elif isinstance(effect, CancelAttempt):
            if effect.incarnation.replica_id in self.replicas:
                self.replicas[effect.incarnation.replica_id].cancel(effect.attempt)
        elif isinstance(effect, WantSnapshot):
            replica = self.replicas[effect.incarnation.replica_id]
            self.board.fleet.index.snapshot(effect.incarnation, replica.snapshot())
        elif isinstance(effect, Opened):
            self.outcomes[effect.batch_id].opened = True
        elif isinstance(effect, Emit):
            self.outcomes[effect.batch_id].deltas.append(effect.delta)
            if effect.delta.token_ids:
                self.first_s.setdefault(effect.batch_id, self.now)
        elif isinstance(effect, Reject):
            outcome = self.at_batch(effect.batch_id)
            outcome.rejected, outcome.rejected_s = effect, self.now
        elif isinstance(effect, Notice):
            self.notices.append(effect)
        elif isinstance(effect, Ended):
            self.at_batch(effect.batch_id).ended = True

    def at_batch(self, batch_id: int) -> Outcome:
        return self.outcomes[batch_id]

    # --- facts -------------------------------------------------------------------------------------------------------

    def queue_times(self) -> list[float]:
        return sorted(value for replica in self.replicas.values() for value in replica.queue_times.values())

    def own(self) -> int:
        """Leases the router holds."""
        return sum(known.view.own for known in self.board.fleet.all())
