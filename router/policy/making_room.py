"""Who leaves a full queue for whom: nobody is shed while others exceed their share, nor for a class with more time."""

from __future__ import annotations

from router.policy.classes import Classes
from router.policy.queue import Waiting, WaitQueue
from router.policy.standing import Standing


def make_room(queue: WaitQueue, standing: Standing, classes: Classes, one: Waiting, now: float) -> list[Waiting] | None:
    """Those that must leave so that `one` has room, the latest deadlines of each lane first. None: there is no room for it."""
    if queue.has_room(one.view):
        return []
    if not queue.could_hold(one.view):
        return None
    view = one.view
    limit_s = classes.patience_s(view.request_class, one.slo)
    behind = standing.behind(now)
    has_its_share = not standing.exceeds(view.tenant, now)
    requests, tokens = queue.lacking(view)
    leaving: list[Waiting] = []
    for name, tenant in queue.lanes():
        is_behind = name in behind and name != view.request_class
        exceeds = has_its_share and name == view.request_class and tenant != view.tenant and standing.exceeds(tenant, now)
        for last in queue.latest(name, tenant):
            if requests <= 0 and tokens <= 0:
                return leaving
            if not exceeds and (is_behind or classes.patience_s(name, last.slo) <= limit_s):
                break
            leaving.append(last)
            requests -= last.view.choices
            tokens -= last.view.all_tokens
    return leaving if requests <= 0 and tokens <= 0 else None
