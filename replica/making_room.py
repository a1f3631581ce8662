"""Preemption, before the first row of a step is made: so nobody is both scheduled and preempted in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from replica.block_pool import BlockPool
from replica.growth import Forecast, lacks_page
from replica.rehearsal import Rehearsal, Start
from replica.request import Request
from replica.roster import Roster
from replica.victim import ChooseVictim, choose_lower, may_yield

_URGENT_MAX = 8  # waiting requests for which others are preempted in a step


def make_room_for_growth(roster: Roster, choose: ChooseVictim) -> bool:
    """Preempt until everyone who needs a page for its next token can have one. True if anybody had to yield."""
    pool, size = roster.kv.pool, roster.kv.block_size
    if pool.available >= len(roster.running):
        return False
    growing = sum(1 for request in roster.running if lacks_page(request, size))
    yielded = False
    while growing > pool.available:
        victim = choose(roster.running, roster.redo_tokens)
        assert victim is not None, "a request alone in the pool does not fit: it should never have been accepted"
        growing -= lacks_page(victim, size)
        roster.preempt(victim)
        yielded = True
    return yielded


def make_room_for_urgent(roster: Roster, rehearsal: Rehearsal) -> None:
    """Preempt strictly less urgent requests for waiting ones that lack a slot or pages, and start in this step if they get them."""
    started: list[Start] = []  # who will start before
    for request in roster.waiting.first(_URGENT_MAX):
        if not any(may_yield(other, request.priority) for other in roster.running):
            return  # nor to one of those behind, who are no more urgent
        match = roster.kv.match(request)
        victims = _victims_for(roster, (request, match), started, rehearsal)
        if victims is not None:
            for victim in victims:
                roster.preempt(victim)
            started.append((request, match))
            if victims:
                started = _matched_anew(roster, started)
        elif roster.waiting.is_aged(request):
            return  # nobody starts before it


def _victims_for(roster: Roster, start: Start, started: list[Start], rehearsal: Rehearsal) -> list[Request] | None:
    """Who has to yield so that `start` is made beside `started` and those who stay; None if it cannot, whoever yields."""
    pool, size = roster.kv.pool, roster.kv.block_size
    request = start[0]
    starts = [*started, start]
    takes = _takes(pool, starts)
    lacking = sum(taken for _, taken in takes) - pool.available
    lacking += sum(lacks_page(other, size) for other in roster.running)
    slots = roster.free_slots - len(started)
    if lacking > sum(len(other.blocks) + 1 for other in roster.running if may_yield(other, request.priority)):
        return None
    staying = list(roster.running)
    victims: list[Request] = []
    shared = frozenset(block for _, match in starts for block in match.shared)  # does not come back, whoever yields
    released: Counter[int] = Counter()  # blocks, by how many of their holders yield
    freed = 0
    while slots + len(victims) < 1 or lacking > freed:
        victim = choose_lower(staying, request.priority, roster.redo_tokens)
        if victim is None:
            return None
        staying.remove(victim)
        victims.append(victim)
        lacking -= lacks_page(victim, size)
        for block in victim.blocks:
            released[block] += 1
            freed += block not in shared and released[block] == pool.references(block)
    if victims and not rehearsal.gets_a_chunk(start, staying, started):
        return None
    if not _starts(roster, takes, staying, freed):
        return None
    if victims and rehearsal.stands_back(start, staying, started):
        request.history.stand_back(roster.step_id)
        return None
    return victims


def _matched_anew(roster: Roster, started: list[Start]) -> list[Start]:
    """Somebody has yielded: what they shared with him is available now, so it is to be pinned."""
    return [(request, roster.kv.match(request)) for request, _ in started]


def _takes(pool: BlockPool, starts: Iterable[Start]) -> list[tuple[Request, int]]:
    """Blocks that each takes out of the available ones, started in this order: what two of them share is pinned once."""
    pinned: set[int] = set()
    takes = []
    for request, match in starts:
        new = {block for block in match.shared if pool.references(block) == 0} - pinned
        pinned |= new
        takes.append((request, match.fresh + len(new)))
    return takes


def _starts(roster: Roster, takes: Sequence[tuple[Request, int]], staying: list[Request], freed: int) -> bool:
    """The rule by which the last one will be started (replica.starting): alone, where others would yield to it, or if everybody's
    growth fits. `takes`: blocks, of those who start before and its own."""
    *started, (request, needed) = takes
    if any(other.priority > request.priority for other in staying) or not (staying or started):
        return True
    everyone = Forecast(
        capacity=roster.kv.pool.count,
        in_use=roster.kv.pool.referenced - freed,
        block_size=roster.kv.block_size,
        running=staying,
        growth=roster.growth,
    )
    for other, taken in started:
        everyone.add(other, taken)
    return everyone.fits(request, needed)
