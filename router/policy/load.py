"""What the router knows of one replica: its last report, and the router's own work on it (DESIGN §6, L9).

Own work is a lease per attempt, kept by set membership: an attempt is *pending* from its dispatch until a frame's
`accepted` names it (from then on the report counts it), and *accepted* until it ends. Nothing is ever incremented.
All of it belongs to one incarnation and goes with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from replica.contract.messages import EngineLimits, LoadReport, Welcome
from router.policy.incarnation import Incarnation

if TYPE_CHECKING:
    from router.policy.forecast import Outlook
    from router.policy.prediction import Prediction

REPORT_LEASE_S = 1.0  # two heartbeat periods; an older report is judged by own counts


class Lease(msgspec.Struct, frozen=True, gc=False):
    """One attempt's claim on a replica, as predicted when it was dispatched."""

    attempt: int
    new_tokens: int  # to prefill: prompt and emitted tokens that no cache there was believed to hold
    context_tokens: int  # prompt and emitted
    blocks: int  # KV blocks it needs beside cached ones
    dispatched_s: float  # the router's clock
    predicted_wait_s: float = 0.0  # as the step-time model says, unscaled
    predicted_ttft_s: float = 0.0
    grain_s: float = 0.05  # one step there, then
    cached_tokens: int = 0  # believed hit
    prediction: Prediction | None = None  # calibrated


class Claims(msgspec.Struct, frozen=True, gc=False):
    """Sums over pending leases."""

    requests: int
    new_tokens: int
    context_tokens: int
    blocks: int


NO_CLAIMS = Claims(0, 0, 0, 0)


class ReplicaView:
    """One incarnation: limits, last report and its age, own leases."""

    def __init__(self, incarnation: Incarnation, welcome: Welcome, now: float) -> None:
        self.incarnation = incarnation
        self.limits: EngineLimits = welcome.limits
        self.model = welcome.model
        self.revision = welcome.revision
        self.fingerprint = welcome.fingerprint
        self.load: LoadReport = welcome.load
        self.reported_s = now
        self.stepped_s = now  # when its progress last changed, or a first step was told of
        self.leaving = False  # membership has let it go; it serves what it has until its link closes
        self.draining_since_s: float | None = now if welcome.load.draining else None
        self.pending: dict[int, Lease] = {}
        self.accepted: dict[int, Lease] = {}
        self.outlook: Outlook | None = None  # forecast's own, forgotten whenever what it was made of changes
        self._claims: Claims | None = NO_CLAIMS

    def report(self, load: LoadReport, accepted: tuple[int, ...], now: float) -> None:
        """A frame came: its load counts `accepted`."""
        was_idle = self.load.running + self.load.waiting == 0
        if load.progress != self.load.progress or (was_idle and load.running + load.waiting > 0):
            self.stepped_s = now
        self.load = load
        self.reported_s = now
        self.outlook = None
        for attempt in accepted:
            self.accept(attempt)
        self.drain(now)

    def drain(self, now: float, bounced: bool = False) -> None:
        """No new work while it is leaving, says so itself, or has just bounced work for it."""
        if not (self.leaving or self.load.draining or bounced):
            self.draining_since_s = None
        elif self.draining_since_s is None:
            self.draining_since_s = now

    def lease(self, lease: Lease) -> None:
        self.pending[lease.attempt] = lease
        self._claims = self.outlook = None

    def accept(self, attempt: int) -> None:
        """Unknown attempts (ended here meanwhile) are ignored."""
        lease = self.pending.pop(attempt, None)
        if lease is not None:
            self.accepted[attempt] = lease
            self._claims = self.outlook = None

    def release(self, attempt: int) -> Lease | None:
        """The one door out; idempotent."""
        self._claims = self.outlook = None
        return self.pending.pop(attempt, None) or self.accepted.pop(attempt, None)

    @property
    def claims(self) -> Claims:
        if self._claims is None:
            new_tokens = context_tokens = blocks = 0
            for lease in self.pending.values():
                new_tokens += lease.new_tokens
                context_tokens += lease.context_tokens
                blocks += lease.blocks
            self._claims = Claims(len(self.pending), new_tokens, context_tokens, blocks)
        return self._claims

    @property
    def own(self) -> int:
        """Attempts of this router on the replica."""
        return len(self.pending) + len(self.accepted)

    @property
    def is_empty(self) -> bool:
        """Nothing runs, waits or is under way there: the next request is served at once, whatever the model says."""
        return not self.pending and not self.accepted and self.load.running + self.load.waiting == 0

    def is_stale(self, now: float) -> bool:
        age_s = now - self.reported_s
        return age_s > REPORT_LEASE_S and age_s > 2 * self.load.predicted_step_s

    def requests(self, now: float) -> int:
        """Requests there: the report's and what it does not count yet; of a stale report, own counts only if they are more."""
        counted = self.load.running + self.load.waiting
        if len(self.accepted) > counted and self.is_stale(now):
            counted = len(self.accepted)
        return counted + len(self.pending)
