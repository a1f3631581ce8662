"""All that the router knows of its replicas, and what a request could expect from each (pure; DESIGN §6, §8).

One pool at a time: replicas with another fingerprint than the pool's are kept out of routing and failover. Once all of
the pool are leaving, the first newcomer's pool takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from replica.contract.messages import Frame, TokenDelta, Welcome
from router.policy.admission import Outlay
from router.policy.calibration import Calibrations
from router.policy.forecast import Forecast, Hit, OutputLength, fits, forecast, outlook
from router.policy.health import Health, Pulse, Watch
from router.policy.incarnation import Incarnation
from router.policy.load import Lease, ReplicaView
from router.policy.popularity import Popularity
from router.policy.prefix_index import PrefixIndex
from router.policy.request_view import RequestView
from router.policy.scoring import Candidate

_SCORED_MAX = 16  # above it: the longest hits and a random sample, so that the cost of a choice does not grow with the fleet


@dataclass(slots=True)
class Known:
    """One connected replica."""

    view: ReplicaView
    health: Health
    calibrations: Calibrations
    order: int

    @property
    def is_routable(self) -> bool:
        """If it is of the present pool."""
        return self.health.pulse is Pulse.BEATING and self.view.draining_since_s is None


@dataclass(frozen=True, slots=True)
class FrameNews:
    want_snapshot: bool
    returned: bool  # a stalled replica passed its probe


class Fleet:
    def __init__(self, *, prefix_index_bytes_max: int, stall_min_s: float, seed: int, now: float) -> None:
        self.index = PrefixIndex(prefix_index_bytes_max)
        self.output_length = OutputLength()
        self._popularity = Popularity()
        self._stall_min_s = stall_min_s
        self._known: dict[str, Known] = {}
        self._routable: list[Known] | None = None  # None: to be found again, somebody's state has changed
        self._random = Random(seed)
        self._watch = Watch(now)
        self._orders = 0
        self.seen = False  # a replica has ever been connected: until then the fleet is loading
        self.hits_predicted_tokens = 0
        self.hits_actual_tokens = 0

    # --- membership --------------------------------------------------------------------------------------------------

    def connect(self, welcome: Welcome, now: float) -> Incarnation | None:
        """A link said Welcome. None: it belongs to another pool than those that stay, and must not be used."""
        pool = self.pool()
        if pool is not None and pool.draining_since_s is None and pool.fingerprint != welcome.fingerprint:
            return None
        if any(
            known.view.fingerprint == welcome.fingerprint and known.view.limits.block_size != welcome.limits.block_size
            for known in self._known.values()
        ):
            return None  # its blocks have other keys
        self.lose(welcome.replica_id)
        incarnation = Incarnation(welcome.replica_id, welcome.epoch)
        self._orders += 1
        self.seen = True
        self._known[welcome.replica_id] = Known(
            ReplicaView(incarnation, welcome, now), Health(welcome.load, self._stall_min_s, now), Calibrations(), self._orders
        )
        self.index.add(incarnation)
        self._routable = None
        return incarnation

    def lose(self, replica_id: str) -> Incarnation | None:
        """Its link is gone. Leases, index entries and calibration go with the incarnation."""
        known = self._known.pop(replica_id, None)
        if known is None:
            return None
        self.index.remove(known.view.incarnation)
        self._routable = None
        return known.view.incarnation

    def leave(self, replica_id: str, leaving: bool, now: float) -> None:
        """Membership let it go: no new work. Or took it back, before its link was closed."""
        known = self._known.get(replica_id)
        if known is not None:
            known.view.leaving = leaving
            known.view.drain(now)
            self._routable = None

    def drain(self, known: Known, now: float) -> None:
        """It has just bounced work because it is draining."""
        known.view.drain(now, bounced=True)
        self._routable = None

    def get(self, incarnation: Incarnation) -> Known | None:
        known = self._known.get(incarnation.replica_id)
        return known if known is not None and known.view.incarnation == incarnation else None

    def pool(self) -> ReplicaView | None:
        """The latest member of the pool: those that stay before those that leave."""
        latest: ReplicaView | None = None
        for known in reversed(self._known.values()):  # most often the first of them stays
            if known.view.draining_since_s is None:
                return known.view
            latest = latest or known.view
        return latest

    def all(self) -> tuple[Known, ...]:
        return tuple(self._known.values())

    # --- what replicas say -------------------------------------------------------------------------------------------

    def frame(self, incarnation: Incarnation, frame: Frame, now: float) -> FrameNews | None:
        """None: late, of another life."""
        known = self.get(incarnation)
        if known is None or frame.epoch != incarnation.epoch:
            return None
        was_routable = known.is_routable
        known.view.report(frame.load, frame.accepted, now)
        returned = known.health.frame(frame.load, known.view.own > 0, now)
        known.health.expect(outlook(known.view, self.output_length.mean, now).step_s)
        if known.is_routable is not was_routable:
            self._routable = None
        return FrameNews(self.index.frame(incarnation, frame), returned)

    def check(self, now: float) -> tuple[Incarnation, ...]:
        """Replicas just found stalled. To be called a few times a second."""
        pause_s = self._watch.tick(now)
        if pause_s > 0:
            for known in self._known.values():
                known.health.excuse(pause_s)
        stalled = tuple(known.view.incarnation for known in self._known.values() if known.health.check(now))
        if stalled:
            self._routable = None
        return stalled

    # --- own work ----------------------------------------------------------------------------------------------------

    def lease(self, incarnation: Incarnation, attempt: int, request: RequestView, expected: Forecast, now: float) -> None:
        """An attempt goes to a replica: from now on it counts, and its blocks are hits to come."""
        known = self._known[incarnation.replica_id]
        limits = known.view.limits
        known.view.lease(
            Lease(
                attempt=attempt,
                new_tokens=expected.new_tokens,
                context_tokens=request.prompt_tokens,
                blocks=expected.blocks,
                dispatched_s=now,
                predicted_wait_s=expected.wait_s,
                predicted_ttft_s=expected.ttft_s,
                grain_s=expected.grain_s,
                cached_tokens=expected.cached_tokens,
            )
        )
        self.index.dispatched(incarnation, attempt, request.block_keys, expected.cached_tokens // limits.block_size)
        known.health.work(True, now)
        known.health.expect(outlook(known.view, self.output_length.mean, now).step_s)
        if expected.shared_blocks:
            self._popularity.use(request.block_keys[expected.shared_blocks - 1], now)

    def release(self, incarnation: Incarnation, attempt: int, now: float) -> None:
        """Idempotent, and harmless for an incarnation that is gone."""
        self.index.settled(incarnation, attempt)
        known = self.get(incarnation)
        if known is not None:
            known.view.release(attempt)
            known.health.work(known.view.own > 0, now)

    def first_delta(self, incarnation: Incarnation, delta: TokenDelta, now: float) -> None:
        """The attempt's prefill is through: its blocks are reported by now, and two predictions meet their outcome."""
        self.index.settled(incarnation, delta.attempt)
        known = self.get(incarnation)
        lease = None if known is None else known.view.accepted.get(delta.attempt)
        if known is None or lease is None:
            return
        if delta.cached_tokens is not None:
            self.hits_predicted_tokens += lease.cached_tokens
            self.hits_actual_tokens += delta.cached_tokens
        if delta.waited_s is not None:
            known.calibrations.wait.observe(lease.predicted_wait_s, delta.waited_s, lease.grain_s, now)
        ttft_s = now - lease.dispatched_s
        known.calibrations.observe_ttft(lease.new_tokens, lease.predicted_ttft_s, ttft_s, lease.grain_s, now)

    # --- the question ------------------------------------------------------------------------------------------------

    def routable(self) -> Sequence[Known]:
        """Kept until somebody's state changes: asking costs nothing, however many there are. Not to be changed by the caller."""
        if self._routable is None:
            pool = self.pool()
            self._routable = [known for known in self._known.values() if pool is not None and _is_of(pool, known)]
        return self._routable

    def is_routable(self, known: Known) -> bool:
        pool = self.pool()
        return pool is not None and _is_of(pool, known)

    def outlays(self, request: RequestView, candidates: Sequence[Known], now: float, *, sample: bool = True) -> list[Outlay]:
        """What to expect from each candidate that could ever run it; of many, from the likely ones and a sample."""
        depths = self.index.match(request.block_keys)
        shared = max(depths.values(), default=0)
        uses = self._popularity.uses(request.block_keys[shared - 1], now) if shared else 0.0
        if sample and len(candidates) > _SCORED_MAX:
            candidates = _likely(candidates, depths, self._random)
        found: list[Outlay] = []
        for known in candidates:
            view = known.view
            if not fits(view, request):
                continue
            expected = forecast(
                view, request, Hit(depths.get(view.incarnation, 0), shared, uses), output_tokens=self.output_length.mean, now=now
            )
            slo_s = view.limits.step_slo_s
            candidate = Candidate(
                incarnation=view.incarnation,
                forecast=expected,
                view=view,
                scale=known.calibrations.ttft(expected.new_tokens).scale(now),
                keeps_tpot=slo_s is None or expected.tpot_s <= slo_s,
                is_stale=view.is_stale(now),
                tiebreak=known.order,
            )
            found.append(Outlay(candidate, known.calibrations.wait, view.is_empty))
        return found

    def backlog_s(self, now: float) -> float:
        """Predicted seconds until they have drained what they hold, the mean of the routable ones."""
        drains = [outlook(one.view, self.output_length.mean, now).drain_s for one in self.routable()]
        return sum(drains) / len(drains) if drains else 0.0


def _is_of(pool: ReplicaView, known: Known) -> bool:
    return known.is_routable and known.view.fingerprint == pool.fingerprint


def _likely(candidates: Sequence[Known], depths: dict[Incarnation, int], random: Random) -> list[Known]:
    """Half of them for their hits, half by chance."""
    half = _SCORED_MAX // 2
    deepest = dict.fromkeys(sorted(depths, key=lambda one: -depths[one])[:half])
    chosen = [known for known in candidates if known.view.incarnation in deepest]
    return chosen + [known for known in random.sample(candidates, half) if known.view.incarnation not in deepest]
