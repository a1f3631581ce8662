"""What may go wrong, and when: plain values, so that a schedule can be printed, drawn from a seed, or written down."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FaultKind(enum.StrEnum):
    DIE = "die"  # the process is gone; after `lasts_s` another incarnation is up
    HANG = "hang"  # connected, and no step ends; wakes after `lasts_s`
    SLOW = "slow"  # its steps take `amount` times as long
    LATE = "late"  # its frames to one router arrive `amount` seconds later
    DISCONNECT = "disconnect"  # one router's link is lost with all that was under way; another comes after `lasts_s`
    RELIC = "relic"  # frames of another epoch, and of an older sequence, arrive at one router
    JUMP = "jump"  # one router's clock jumps by `amount` seconds
    HANG_UP = "hang_up"  # a client of one router goes away


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: FaultKind
    replica: int = 0
    router: int = 0
    lasts_s: float = 1.0
    amount: float = 1.0
