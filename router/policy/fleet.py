"""All that the router knows of its replicas, and what a request could expect from each (pure; DESIGN §6, §8).

One pool at a time: replicas with another fingerprint than the pool's are kept out of routing and failover. Once all of
the pool are leaving, the first newcomer's pool takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec

from replica.contract.messages import Frame, TokenDelta, Welcome
from router.policy.admission import Outlay
from router.policy.calibration import Calibrations
from router.policy.forecast import Forecast, Hit, OutputLength, fits, forecast, outlook
from router.policy.health import Flaps, Health, Watch
from router.policy.incarnation import Incarnation
from router.policy.known import Known
from router.policy.likely import likely
from router.policy.load import Lease, ReplicaView
from router.policy.of_late import LeastOfLate
from router.policy.popularity import Popularity
from router.policy.prediction import Coverage, Prediction
from router.policy.prefix_index import PrefixIndex
from router.policy.prefix_match import PrefixMatch
from router.policy.report_check import Lies, limits_fault, load_fault
from router.policy.request_view import RequestView
from router.policy.scoring import Candidate
from router.policy.utilisation import Utilisation

SCORED_MAX = 16  # above it: the longest hits and a random sample, so that the cost of a choice does not grow with the fleet
HIT_S = 300.0  # a prefix that was found counts for so long, and at most twice as long
_NO_HIT = Hit()


class FrameNews(msgspec.Struct, frozen=True, gc=False):
    want_snapshot: bool
    returned: bool  # a stalled replica passed its probe


class Fleet:
    def __init__(self, *, prefix_index_bytes_max: int, admission_quantile: float = 0.98, seed: int, now: float) -> None:
        self.index = PrefixIndex(prefix_index_bytes_max)
        self.output_length = OutputLength()
        self._popularity = Popularity()
        self._utilisation = Utilisation()
        self._known: dict[str, Known] = {}
        self._routable: list[Known] | None = None  # None: to be found again, somebody's state has changed
        self._random = Random(seed)
        self._watch = Watch(now)
        self._orders = 0
        self.seen = False  # a replica has ever been connected: until then the fleet is loading
        self.hits_predicted_tokens = 0
        self.hits_actual_tokens = 0
        self.hits = LeastOfLate(HIT_S)  # tokens that prompts found in a cache, negative: the least is the longest
        self.coverage = Coverage(admission_quantile)
        self.lies = Lies()
        self._flaps = Flaps()

    # --- membership --------------------------------------------------------------------------------------------------

    def connect(self, welcome: Welcome, now: float) -> Incarnation | None:
        """A link said Welcome. None: it belongs to another pool than those that stay, or says what cannot be, and must not be used."""
        fault = limits_fault(welcome.limits) or load_fault(welcome.load, welcome.limits)
        if fault is not None:
            self.lies.note(fault)
            return None
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
            ReplicaView(incarnation, welcome, now),
            Health(welcome.load, now, flaps=self._flaps.connected(incarnation, now)),
            Calibrations(),
            self._orders,
        )
        self.index.add(incarnation)
        self._routable = None
        return incarnation

    def lose(self, replica_id: str, now: float | None = None) -> Incarnation | None:
        """Its link is gone. Leases, index entries and calibration go with the incarnation."""
        known = self._known.pop(replica_id, None)
        if known is None:
            return None
        self.index.remove(known.view.incarnation)
        self._routable = None
        if now is not None:
            self._flaps.lost(known.view.incarnation, now)
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
            self.lies.note("epoch" if known is not None else "gone")
            return None
        fault = load_fault(frame.load, known.view.limits, known.view.load)
        if fault is not None:  # its tokens are good, what it says of itself is not: judged by own counts, and soon avoided
            self.lies.note(fault)
            for attempt in frame.accepted:
                known.view.accept(attempt)
            return FrameNews(self.index.frame(incarnation, frame), returned=False)
        known.routers = frame.routers
        was_routable = known.is_routable
        known.view.report(frame.load, frame.accepted, now)
        returned = known.health.frame(frame.load, known.view.own > 0, now)
        if known.is_routable is not was_routable:
            self._routable = None
        return FrameNews(self.index.frame(incarnation, frame), returned)

    def check(self, now: float) -> tuple[tuple[Incarnation, ...], float]:
        """Replicas just found stalled, and for how long the router itself stood still. To be called a few times a second."""
        pause_s = self._watch.tick(now)
        for known in self._known.values():
            if pause_s > 0:
                known.health.excuse(pause_s)
            known.expect(self.output_length.mean, now)
        stalled = tuple(known.view.incarnation for known in self._known.values() if known.health.check(now))
        if stalled:
            self._routable = None
        return stalled, pause_s

    # --- own work ----------------------------------------------------------------------------------------------------

    def lease(self, incarnation: Incarnation, attempt: int, request: RequestView, expected: Forecast, now: float) -> Prediction:
        """An attempt goes to a replica: from now on it counts, and its blocks are hits to come. What is expected, from now on."""
        known = self._known[incarnation.replica_id]
        limits = known.view.limits
        waits, ttfts = known.calibrations.wait, known.calibrations.ttft(expected.new_tokens)
        prediction = Prediction(
            waits.quantiles_s(expected.wait_s, expected.grain_s, self.coverage.quantiles, now),
            ttfts.quantiles_s(expected.ttft_s, expected.grain_s, self.coverage.quantiles, now),
            expected.new_tokens,
            expected.cached_tokens,
        )
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
                prediction=prediction,
            )
        )
        self.index.dispatched(incarnation, attempt, request.block_keys, expected.cached_tokens // limits.block_size)
        # the other routers are as busy: each sees its own work only
        self._utilisation.add(expected.new_tokens * expected.token_s * max(1, known.routers), now)
        known.health.work(True, now)
        known.expect(self.output_length.mean, now)
        if expected.shared_blocks:
            self._popularity.use(request.block_keys[expected.shared_blocks - 1], now)
        return prediction

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
            self.hits.see(-float(delta.cached_tokens), now)
        if delta.waited_s is not None:
            known.calibrations.wait.observe(lease.predicted_wait_s, delta.waited_s, lease.grain_s, now)
            if lease.prediction is not None:
                promises = self.coverage.observe("queue_time", lease.new_tokens, lease.prediction.queue_times_s, delta.waited_s)
                known.calibrations.wait.kept(promises)
        ttft_s = now - lease.dispatched_s
        if lease.prediction is not None:
            promises = self.coverage.observe("ttft", lease.new_tokens, lease.prediction.ttfts_s, ttft_s)
            known.calibrations.kept_ttft(lease.new_tokens, promises)
        known.calibrations.observe_ttft(lease.new_tokens, lease.predicted_ttft_s, ttft_s, lease.grain_s, now)

    # --- the question ------------------------------------------------------------------------------------------------

    def routable(self) -> Sequence[Known]:
        """Kept until somebody's state changes: asking costs nothing, however many there are. Not to be changed by the caller."""
        if self._routable is None:
            pool = self.pool()
            self._routable = [known for known in self._known.values() if known.is_in(pool)]
        return self._routable

    def outlays(self, request: RequestView, candidates: Sequence[Known], now: float, *, sample: bool = True) -> list[Outlay]:
        """What to expect from each candidate that could ever run it; of many, from the likely ones and a sample."""
        match = self.index.match(request.block_keys)
        shared = match.longest
        uses = self._popularity.uses(request.block_keys[shared - 1], now) if shared else 0.0
        if sample and len(candidates) > SCORED_MAX:
            candidates = likely(candidates, _holders(self, match), SCORED_MAX, self._random)
        utilisation = self._utilisation.of(len(self.routable()), now)
        output_tokens = self.output_length.mean
        found: list[Outlay] = []
        for known in candidates:
            view = known.view
            if not fits(view, request):
                continue
            hit = Hit(match.blocks(view.incarnation), shared, uses) if shared else _NO_HIT
            ahead = outlook(view, output_tokens, now)
            expected = forecast(view, request, hit, ahead)
            slo_s = view.limits.step_slo_s
            known.health.expect(ahead.step_s)
            ttfts = known.calibrations.ttft(expected.new_tokens)
            candidate = Candidate(
                view.incarnation,
                expected,
                view,
                scale=_scale(expected, ttfts.scale(now)) / known.health.weight(now),
                keeps_tpot=slo_s is None or expected.tpot_s <= slo_s,
                is_stale=view.is_stale(now),
                tiebreak=known.order,
                utilisation=utilisation,
            )
            found.append(Outlay(candidate, known.calibrations.wait, ttfts, view.is_empty))
        return found

    @property
    def routers(self) -> int:
        """Live ones, this one included, as most replicas see it."""
        seen = sorted(known.routers for known in self._known.values())
        return max(1, seen[len(seen) // 2]) if seen else 1


def backlog_s(fleet: Fleet, now: float) -> float:
    """Predicted seconds until they have drained what they hold, the mean of the routable ones."""
    drains = [outlook(one.view, fleet.output_length.mean, now).drain_s for one in fleet.routable()]
    return sum(drains) / len(drains) if drains else 0.0


def _holders(fleet: Fleet, match: PrefixMatch) -> list[Known]:
    """Those with the longest hits."""
    return [known for one in match.holders(SCORED_MAX // 2) if (known := fleet.get(one)) is not None]


def _scale(expected: Forecast, learned: float) -> float:
    """What was learned of long waits says nothing within one step: else a streak of short prompts would all go to one of two
    equal replicas, and the other would never get the chance to show that it has recovered.
    """
    if expected.ttft_s <= 0:
        return 1.0
    fine_s = min(expected.ttft_s, expected.grain_s)
    return (fine_s + learned * (expected.ttft_s - fine_s)) / expected.ttft_s
