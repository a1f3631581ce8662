"""How many cores this process may use, and how replicas share them."""

from __future__ import annotations

import os
from pathlib import Path

ENGINE_NICENESS = 15  # Ray's own for workers
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota_file: Path = _CGROUP_QUOTA) -> int:
    """Cores of the affinity mask, or the container's quota if that is less; at least 1."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = quota_file.read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    except (OSError, ValueError):
        pass  # no control group, or of the older kind
    return max(1, cores)


def yield_to_others(niceness: int = ENGINE_NICENESS) -> int:
    """Lower this process's priority to `niceness` if it is higher; returns what it is then.

    An engine on the CPU takes every core it can get, and a router that waits for it answers late: who only needs 100 us now
    and then comes first. To be called before threads are started, because those that run already keep theirs.
    """
    return os.nice(max(0, niceness - os.nice(0)))


def threads_per_replica(cores: int, replicas: int, reserved_cpus: float) -> int:
    """What Ray has reserved for the replica, as far as there are cores, else an equal share: more threads than cores only spin."""
    if reserved_cpus > 0:
        return max(1, min(cores, int(reserved_cpus)))
    return max(1, cores // max(1, replicas))
