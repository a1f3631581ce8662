"""One life of one replica."""

from __future__ import annotations

from typing import NamedTuple


class Incarnation(NamedTuple):
    """What leases, index entries and attempts belong to: a restarted replica has the same id and another epoch."""

    replica_id: str
    epoch: int
