"""How many connections this process may have: each is an open file, and the system limits those of a process."""

from __future__ import annotations

import resource

from bench.load import Load

KEPT = 128  # open files for everything else; of a small limit half
IN_FLIGHT_MAX = 10_000  # requests of an open loop at a time; one beyond them waits, and its latency says so


def within(limit: int, wanted: int) -> int:
    """Of `wanted` connections those that a limit of open files leaves; at least 1."""
    if limit == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, limit - min(KEPT, limit // 2)))


def allow(connections: int) -> int:
    """Raise the soft limit as far as is needed and allowed; how many of them there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + KEPT
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    return within(soft, connections)


def check_streams(load: Load, requests: int) -> None:
    """Raises ValueError for a closed loop of more clients than there may be connections: the others would only count as errors."""
    if load.streams is None:
        return
    wanted = min(load.streams, requests)
    allowed = within(resource.getrlimit(resource.RLIMIT_NOFILE)[1], wanted)
    if allowed < wanted:
        raise ValueError(f"{wanted:,} streams are as many connections, and this process may have {allowed:,} (ulimit -Hn): ask for fewer")
