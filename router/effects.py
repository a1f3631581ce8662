"""What the pure part of the router wants done: values that the shell (or a simulator) carries out, in order."""

from __future__ import annotations

from dataclasses import dataclass

from replica.contract.messages import GenerateRequest
from router.policy.incarnation import Incarnation
from router.ports import Delta


@dataclass(frozen=True, slots=True)
class Submit:
    incarnation: Incarnation
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    incarnation: Incarnation
    attempt: int


@dataclass(frozen=True, slots=True)
class WantSnapshot:
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Notice:
    """Worth a line in the log."""

    event: str
    replica_id: str
    streams: int  # that move because of it


@dataclass(frozen=True, slots=True)
class Opened:
    """Every choice of the batch is in an engine: the caller gets its session."""

    batch_id: int


@dataclass(frozen=True, slots=True)
class Emit:
    batch_id: int
    delta: Delta


@dataclass(frozen=True, slots=True)
class Reject:
    """Nothing of the batch was emitted and nothing will be."""

    batch_id: int
    status: int
    reason: str
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """Every choice of the batch has its one outcome; nothing follows."""

    batch_id: int


@dataclass(frozen=True, slots=True)
class Release:
    """An attempt has left its replica, however: its lease ends. The switchboard's own; a shell never sees it."""

    incarnation: Incarnation
    attempt: int


Effect = Submit | CancelAttempt | WantSnapshot | Notice | Opened | Emit | Reject | Ended
StreamEffect = Effect | Release
