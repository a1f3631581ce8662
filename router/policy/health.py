"""Is a replica making progress? (DESIGN §8, L11). Ready, live and progressing are three different answers.

A replica is *stalled* when it has work of ours and its progress counter stands still, or when it sends nothing at all
(idle ones send a heartbeat every 0.5 s), for max(STALL_MIN_S, 4 × the predicted step). It returns after a probe: two
fresh frames that show progress, or that it is idle; four times as many after each stall that follows soon. Client
errors and back-pressure never reach this file.

The predicted step is the largest of what the replica predicts, what this router expects of a full step with its own
work counted, and half the longest step seen lately. A replica whose model of its steps is not fitted yet (its first few
steps) has COLD_STALL_MIN_S: a long first step must not look like a death, least of all on every replica in turn.
"""

from __future__ import annotations

import enum

from replica.contract.messages import LoadReport
from router.policy.incarnation import Incarnation

STALL_MIN_S = 2.0
_STEPS = 4
_PROBES = 2
_PROBES_MORE = 4
_STALLS_COUNTED = 3
_HEALED_STEPS = 20  # steps seen after a return: the next stall is a first one again
_SEEN_STEPS = 2  # times the longest step seen
_SEEN_FADES = 0.98  # per step
_COLD_STEPS = 16
COLD_STALL_MIN_S = 15.0
_ROUTER_PAUSE_S = 1.0  # the router itself was not running for so long: silence meanwhile proves nothing


_WEIGHT_LEAST = 0.1
_WEIGHT_RETURNED = 0.5


class Pulse(enum.Enum):
    BEATING = "beating"
    STALLED = "stalled"


class Health:
    """Progress of one incarnation, as seen by this router."""

    def __init__(self, load: LoadReport, now: float, flaps: int = 0) -> None:
        """`flaps`: links to this same incarnation that broke lately."""
        self._progress = load.progress
        self._step_s = load.predicted_step_s
        self._seen_s = 0.0
        self._moved_s = now  # last progress, or when work began
        self._heard_s = now
        self._worked = False
        self._probes = 0
        self._stalls = 0
        self._steps_seen = 0
        self._flaps = flaps
        self._connected_s = now
        self.pulse = Pulse.BEATING

    def limit_s(self) -> float:
        least_s = COLD_STALL_MIN_S if self._progress < _COLD_STEPS else STALL_MIN_S
        return max(least_s, _STEPS * self._step_s, _SEEN_STEPS * self._seen_s)

    def weight(self, now: float) -> float:
        """How far to trust it, 0.1 to 1; it divides what is expected there. Less the longer it is overdue, after stalls and broken links.

        So a replica in trouble gets less work before it is given none.
        """
        if not (self._worked or self._stalls or self._flaps):
            return 1.0
        weight = 1.0
        if self._worked:
            due_s = max(self._step_s, self._seen_s)
            limit_s = self.limit_s()
            if limit_s > due_s:
                weight -= min(1.0, max(0.0, (now - self._moved_s - due_s) / (limit_s - due_s)))
        if self._stalls and self._steps_seen < _HEALED_STEPS:
            weight = min(weight, _WEIGHT_RETURNED + (1 - _WEIGHT_RETURNED) * self._steps_seen / _HEALED_STEPS)
        if self._flaps and now - self._connected_s < Breaker.HEALED_S:
            weight *= 0.5**self._flaps
        return max(_WEIGHT_LEAST, weight)

    def expect(self, step_s: float) -> None:
        """Of what it reports and what is on its way to it, a full step may take so long."""
        self._step_s = max(self._step_s, step_s)

    def frame(self, load: LoadReport, has_work: bool, now: float) -> bool:
        """A frame came. True: a stalled replica has just returned."""
        moved = load.progress != self._progress
        idle = load.running + load.waiting == 0
        self._progress = load.progress
        self._heard_s = now
        if moved and self._worked:
            self._seen_s = max(now - self._moved_s, _SEEN_FADES * self._seen_s)
        if moved:  # an idle report is no progress: work of ours may be lost on its way to the engine
            self._moved_s = now
        self._step_s = load.predicted_step_s
        self.work(has_work, now)
        if self.pulse is Pulse.BEATING:
            self._steps_seen += moved
            if self._steps_seen >= _HEALED_STEPS:
                self._stalls = 0
            return False
        self._probes = self._probes + 1 if moved or idle else 0
        if self._probes < _PROBES * _PROBES_MORE ** min(self._stalls - 1, _STALLS_COUNTED):
            return False
        self.pulse = Pulse.BEATING
        self._steps_seen = 0
        return True

    def work(self, has_work: bool, now: float) -> None:
        """Work of ours begins or ends there: the clock of progress starts when it begins."""
        if has_work and not self._worked:
            self._moved_s = max(self._moved_s, now)
        self._worked = has_work

    def excuse(self, pause_s: float) -> None:
        """The router itself stood still for so long."""
        self._heard_s += pause_s
        self._moved_s += pause_s

    def check(self, now: float) -> bool:
        """True: it has just been found stalled."""
        if self.pulse is Pulse.STALLED:
            return False
        limit_s = self.limit_s()
        silent = now - self._heard_s > limit_s
        stuck = self._worked and now - self._moved_s > limit_s
        if silent or stuck:
            self.pulse = Pulse.STALLED
            self._probes = 0
            self._stalls += 1
            return True
        return False


class Watch:
    """Tells a pause of the router itself (suspended, starved of CPU) from the silence of replicas."""

    def __init__(self, now: float) -> None:
        self._last_s = now

    def tick(self, now: float) -> float:
        """Seconds to excuse."""
        gap_s = now - self._last_s
        self._last_s = now
        return gap_s if gap_s > _ROUTER_PAUSE_S else 0.0


class Breaker:
    """Transport errors in a row; a while of connection forgets them. When to try again is router.backoff's business."""

    HEALED_S = 10.0

    def __init__(self) -> None:
        self.failures = 0
        self._connected_s: float | None = None

    def connected(self, now: float) -> None:
        self._connected_s = now

    def failed(self, now: float) -> int:
        """A connection was lost or never made; failures in a row."""
        if self._connected_s is not None and now - self._connected_s >= self.HEALED_S:
            self.failures = 0
        self._connected_s = None
        self.failures += 1
        return self.failures


class Flaps:
    """Links to one and the same incarnation that broke: a restarted replica starts anew. Bounded; the oldest are forgotten."""

    _KEPT_MAX = 1024
    COUNTED_MAX = 3

    def __init__(self) -> None:
        self._lost: dict[str, tuple[Incarnation, int, float]] = {}  # replica → life, breaks in a row, when the last one was

    def lost(self, incarnation: Incarnation, now: float) -> None:
        count = self.connected(incarnation, now)
        self._lost.pop(incarnation.replica_id, None)
        self._lost[incarnation.replica_id] = (incarnation, count + 1, now)
        if len(self._lost) > self._KEPT_MAX:
            del self._lost[next(iter(self._lost))]

    def connected(self, incarnation: Incarnation, now: float) -> int:
        """Breaks that still count against it."""
        last, count, at_s = self._lost.get(incarnation.replica_id, (None, 0, 0.0))
        return min(count, self.COUNTED_MAX) if last == incarnation and now - at_s < Breaker.HEALED_S else 0
