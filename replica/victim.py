"""Who yields when there is no room: the one rule of preemption."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replica.request import Request

ChooseVictim = Callable[[Sequence[Request], Callable[[Request], int]], Request | None]

PREEMPTIONS_MAX = 2  # a request preempted that often is exempt


def choose_victim(running: Sequence[Request], redo_tokens: Callable[[Request], int]) -> Request | None:
    """The running request that yields so that another can grow; None if there is nobody but the oldest.

    The least urgent class yields first. Among equals the oldest never does: it can always finish, so there is progress.
    Of the others the cheapest to redo yields, ties to the youngest; who has been preempted PREEMPTIONS_MAX times is
    exempt; if all are exempt, the youngest yields.
    """
    if not running:
        return None
    worst = max(request.priority for request in running)
    mixed = any(request.priority != worst for request in running)
    equals = [request for request in running if request.priority == worst]
    oldest = min(equals, key=_number)
    others = [request for request in equals if request is not oldest]
    if not others:
        return oldest if mixed else None
    return _cheapest(others, redo_tokens) or max(others, key=_number)


def choose_latest(running: Sequence[Request], redo_tokens: Callable[[Request], int]) -> Request | None:
    """The baselines' rule, whatever it costs to redo: the latest arrival of the least urgent class, but never the last that runs."""
    return max(running, key=lambda request: (request.priority, request.number)) if len(running) > 1 else None


def may_yield(request: Request, priority: int) -> bool:
    """To a waiting request of `priority`."""
    return request.priority > priority and request.history.preemptions < PREEMPTIONS_MAX


def choose_lower(running: Sequence[Request], priority: int, redo_tokens: Callable[[Request], int]) -> Request | None:
    """The one that yields to a waiting request of `priority`: strictly less urgent and not exempt, else None."""
    lower = [request for request in running if may_yield(request, priority)]
    if not lower:
        return None
    worst = max(request.priority for request in lower)
    return _cheapest([request for request in lower if request.priority == worst], redo_tokens)


def _cheapest(candidates: Sequence[Request], redo_tokens: Callable[[Request], int]) -> Request | None:
    free_to_go = [request for request in candidates if request.history.preemptions < PREEMPTIONS_MAX]
    if not free_to_go:
        return None
    return min(free_to_go, key=lambda request: (redo_tokens(request), -request.number))


def _number(request: Request) -> int:
    return request.number
