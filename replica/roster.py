"""Who runs, who waits, who is under suspicion; and the one door by which slots and blocks come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from replica.growth import GrowthEstimate
from replica.kv_manager import KvManager, Match
from replica.plan import Plan
from replica.request import Request, State
from replica.scheduling_policy import SchedulingPolicy
from replica.step import BlockCopy
from replica.waiting_queue import WaitingQueue


class Roster:
    """Every open request is in `running` (holds a slot and blocks) or in `waiting` (holds nothing), never in both."""

    def __init__(self, kv: KvManager, policy: SchedulingPolicy, slots: int) -> None:
        self.kv = kv
        self.slots = slots
        self.growth = GrowthEstimate()
        self.running: list[Request] = []  # in order of their start
        self.waiting = WaitingQueue(bypasses_max=policy.bypasses_max, rank=policy.rank)
        self.preemptions = 0
        self.changes = 0  # arrivals and departures so far: who has seen them all need not look again
        self.step_id = 0  # of the step being planned, or planned last
        self._suspects: deque[Request] = deque()

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.running)

    def add(self, request: Request) -> None:
        """A new one. The look into the cache is for the load report, which says what it will have to compute."""
        self.kv.match(request)
        self.waiting.add(request)
        self.changes += 1

    def start(self, request: Request, match: Match) -> BlockCopy | None:
        """From waiting to running, with the pages of all its tokens."""
        self.waiting.remove(request)
        request.move(State.RUNNING)
        copy = self.kv.start(request, match)
        self.running.append(request)
        self.waiting.passed_by(request)
        return copy

    def release(self, request: Request, to: State) -> None:
        """Out of `running` or `waiting`. What a request holds comes back here and nowhere else."""
        self.changes += 1
        was_running = request.state is State.RUNNING
        request.move(to)
        if was_running:
            self.running.remove(request)
            self.kv.release(request)
        else:
            self.waiting.remove(request)

    def preempt(self, request: Request) -> None:
        """It keeps its tokens, and its published blocks as long as nobody else needs their place."""
        self.release(request, State.PREEMPTED)
        request.history.preemptions += 1
        request.history.preempted_at_step = self.step_id
        self.preemptions += 1
        self.waiting.add(request)

    def redo_tokens(self, request: Request) -> int:
        """What preempting `request` would cost: its computed tokens, less those in blocks that somebody else holds too."""
        kept = 0
        pool = self.kv.pool
        for block in request.blocks:
            if pool.references(block) < 2:
                break
            kept += 1
        return max(0, request.computed - kept * self.kv.block_size)

    def distrust(self, failed: Plan) -> None:
        """A step raised: nothing of it counts. Everybody starts anew, and who was in it alone, one after another."""
        for request, row in zip(failed.requests, failed.step.rows, strict=True):
            if request.state is State.RUNNING:
                request.history.suspect_until = row.start + len(row.tokens)
                self._suspects.append(request)
        for request in list(self.running):
            self.release(request, State.PREEMPTED)
            self.waiting.add(request)

    def next_suspect(self) -> Request | None:
        """The first that has not yet got past the place where its step failed."""
        while self._suspects:
            request = self._suspects[0]
            if request.state is not State.FINISHED and request.computed < request.history.suspect_until:
                return request
            self._suspects.popleft()
        return None

    def check(self, open_requests: Sequence[Request]) -> None:
        """Who runs, who waits and who is open are the same requests; the pool accounts for all of them."""
        for request in self.running:
            assert request.state is State.RUNNING, f"request {request.number} runs, but is {request.state.value}"
        for request in self.waiting:
            assert request.state in (State.WAITING, State.PREEMPTED) and not request.blocks
        here = sorted(request.number for request in (*self.running, *self.waiting))
        assert here == sorted(request.number for request in open_requests), "somebody is in no place, or in two"
        assert len(self.running) <= self.slots
        self.kv.check(self.running)
