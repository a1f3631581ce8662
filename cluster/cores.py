"""How many cores this process may use, and how replicas share them."""

from __future__ import annotations

import os
from pathlib import Path

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


def threads_per_replica(cores: int, replicas: int, reserved_cpus: float) -> int:
    """What Ray has reserved for the replica, else an equal share of the machine: more threads than cores spin against each other."""
    if reserved_cpus > 0:
        return max(1, int(reserved_cpus))
    return max(1, cores // max(1, replicas))
