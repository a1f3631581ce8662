"""Preemption, before the first row of a step is made: so nobody is both scheduled and preempted in a step."""

from __future__ import annotations

from replica.request import Request
from replica.roster import Roster
from replica.victim import ChooseVictim, choose_lower, may_yield

_URGENT_MAX = 8  # waiting requests for which others are preempted in a step


def make_room_for_growth(roster: Roster, choose: ChooseVictim) -> bool:
    """Preempt until everyone who needs a page for its next token can have one. True if anybody had to yield."""
    pool = roster.kv.pool
    if pool.available >= len(roster.running):
        return False
    growing = sum(1 for request in roster.running if _needs_page(roster, request))
    yielded = False
    while growing > pool.available:
        victim = choose(roster.running, roster.redo_tokens)
        assert victim is not None, "a request alone in the pool does not fit: it should never have been accepted"
        growing -= _needs_page(roster, victim)
        roster.preempt(victim)
        yielded = True
    return yielded


def make_room_for_urgent(roster: Roster) -> None:
    """Preempt strictly less urgent requests for waiting ones that lack a slot or pages, where that helps."""
    pool = roster.kv.pool
    slots = roster.free_slots
    blocks = pool.available
    for request in roster.waiting.first(_URGENT_MAX):
        needed = roster.kv.match(request).needed
        could_yield = sum(other.history.own_blocks for other in roster.running if may_yield(other, request.priority))
        if blocks + could_yield < needed:
            continue
        while slots < 1 or blocks < needed:
            victim = choose_lower(roster.running, request.priority, roster.redo_tokens)
            if victim is None:
                return
            before = pool.available
            roster.preempt(victim)
            slots += 1
            blocks += pool.available - before
        slots -= 1
        blocks -= needed


def _needs_page(roster: Roster, request: Request) -> bool:
    return request.remaining == 1 and request.computed == len(request.blocks) * roster.kv.block_size
