"""Run by test_rank_nodes.py in a process of its own: a Ray of three raylets with made-up GPUs, and what `rantang doctor` says on it.

Prints one JSON object: the exit status and the lines of every case.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from typing import Any


def config(size: int, strategy: str, **serve: Any) -> Any:
    from cluster.config import Config

    engine = {"tensor_parallel_size": size, "device": "cpu"}  # the GPUs are made up: torch must not look for them
    return Config.model_validate({"engine": engine, "serve": {"replicas": 1, "placement_strategy": strategy, "replica_gpus": 1, **serve}})


def said(wanted: Any) -> tuple[int, list[str]]:
    from cluster import doctor_command

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = doctor_command.check(wanted)
    return status, [*out.getvalue().splitlines(), *err.getvalue().splitlines()]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="rt", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        token = os.path.join(scratch, "token")
        with open(token, "w") as file:
            file.write(os.urandom(32).hex())
        os.environ |= {"RAY_TMPDIR": scratch, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token}  # read when ray is imported
        sys.stdout.write(json.dumps(results()) + "\n")


def results() -> dict[str, Any]:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for resources in (
            {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False},
            *[{"num_cpus": 1, "num_gpus": 2}] * 2,
        ):
            cluster.add_node(object_store_memory=80_000_000, **resources)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        # SPREAD first: it is a wish, and takes one node where the other is not known to be free again yet
        cases = {"spread": (2, "SPREAD"), "packed": (2, "STRICT_PACK"), "too many": (3, "STRICT_PACK"), "far too many": (5, "PACK")}
        found: dict[str, Any] = {name: said(config(size, strategy)) for name, (size, strategy) in cases.items()}
        found["groups left"] = len([group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"])
        return found
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
