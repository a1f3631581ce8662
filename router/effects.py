"""What the pure part of the router wants done: values that the shell (or a simulator) carries out, in order."""

from __future__ import annotations

import msgspec

from replica.contract.messages import GenerateRequest
from router.policy.incarnation import Incarnation
from router.ports import Delta


class Submit(msgspec.Struct, frozen=True, gc=False):
    incarnation: Incarnation
    request: GenerateRequest


class CancelAttempt(msgspec.Struct, frozen=True, gc=False):
    incarnation: Incarnation
    attempt: int


class WantSnapshot(msgspec.Struct, frozen=True, gc=False):
    incarnation: Incarnation


class Notice(msgspec.Struct, frozen=True, gc=False):
    """Worth a line in the log."""

    event: str
    replica_id: str
    streams: int  # that move because of it


class Opened(msgspec.Struct, frozen=True, gc=False):
    """Every choice of the batch is in an engine: the caller gets its session."""

    batch_id: int


class Emit(msgspec.Struct, frozen=True, gc=False):
    batch_id: int
    delta: Delta


class Reject(msgspec.Struct, frozen=True, gc=False):
    """Nothing of the batch was emitted and nothing will be."""

    batch_id: int
    status: int
    reason: str
    message: str
    retry_after_s: float | None = None


class Ended(msgspec.Struct, frozen=True, gc=False):
    """Every choice of the batch has its one outcome; nothing follows."""

    batch_id: int


class Release(msgspec.Struct, frozen=True, gc=False):
    """An attempt has left its replica, however: its lease ends. The switchboard's own; a shell never sees it."""

    incarnation: Incarnation
    attempt: int


Effect = Submit | CancelAttempt | WantSnapshot | Notice | Opened | Emit | Reject | Ended
StreamEffect = Effect | Release
