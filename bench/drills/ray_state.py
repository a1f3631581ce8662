"""What a running Ray holds, asked by a process of its own: `python -m bench.drills.ray_state` with RAY_ADDRESS set prints JSON.

Placement groups that are not removed, actors that live or wait, and resources in use, by name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec

TIMEOUT_S = 60.0


class RayState(msgspec.Struct, frozen=True):
    placement_groups: int
    in_use: dict[str, float]


def read(run_directory: Path) -> RayState:
    """Of the stack whose run directory this is. Raises OSError or subprocess.SubprocessError."""
    environment = {
        **os.environ,
        "RAY_ADDRESS": (run_directory / "ray-address").read_text(),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(run_directory / "ray-token"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "bench.drills.ray_state"], env=environment, capture_output=True, timeout=TIMEOUT_S, check=True
    )
    return msgspec.json.decode(done.stdout, type=RayState)


def main() -> None:
    import ray
    from ray.util.placement_group import placement_group_table

    ray.init(log_to_driver=False, logging_level="ERROR")
    groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
    total, free = ray.cluster_resources(), ray.available_resources()
    in_use = {name: round(total[name] - free.get(name, 0.0), 4) for name in ("CPU", "GPU") if name in total}
    print(json.dumps({"placement_groups": len(groups), "in_use": in_use}))
    ray.shutdown()


if __name__ == "__main__":
    main()
