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
    import ray
    from ray.cluster_utils import Cluster

    scratch = tempfile.mkdtemp(prefix="rt", dir="/tmp")
    os.environ["RAY_AUTH_MODE"] = "token"
    token = os.path.join(scratch, "token")
    with open(token, "w") as file:
        file.write(os.urandom(32).hex())
    os.environ["RAY_AUTH_TOKEN_PATH"] = token
    node = {"object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "_temp_dir": scratch, **node})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, num_gpus=2, object_store_memory=80_000_000)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        results = {
            "packed": said(config(2, "STRICT_PACK")),
            "spread": said(config(2, "SPREAD")),
            "too many": said(config(3, "STRICT_PACK")),
            "far too many": said(config(5, "PACK")),
        }
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        results["left"] = (len([g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]), [])
        sys.stdout.write(json.dumps(results) + "\n")
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
