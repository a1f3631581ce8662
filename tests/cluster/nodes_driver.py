"""Run by the fixture `on_nodes` in a process of its own: a Ray of three raylets with made-up GPUs, and what Rantang does on it.

    nodes_driver.py MODEL BODY

First what `rantang doctor` says. Then MODEL is served by one replica of two ranks that each reserve a CPU, so that a raylet holds one; BODY
is a chat's. Prints one JSON object: of every case of the doctor the exit status and the lines; and of what was served the nodes that the
ranks' bundles are on, the parents of the ranks' processes, the answer, how the command ended and what was left.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from cluster import processes
from cluster.environment import free_range

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
STORE_BYTES = 80_000_000


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


def groups() -> list[dict[str, Any]]:
    """Placement groups that were not removed."""
    import ray

    return [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]


def doctor() -> dict[str, Any]:
    # SPREAD first: it is a wish, and takes one node where the other is not known to be free again yet
    cases = {"spread": (2, "SPREAD"), "packed": (2, "STRICT_PACK"), "too many": (3, "STRICT_PACK"), "far too many": (5, "PACK")}
    return {name: said(config(size, strategy)) for name, (size, strategy) in cases.items()} | {"groups left": len(groups())}


@contextlib.contextmanager
def serving(model: str, address: str, scratch: str) -> Any:
    """The command once it says that it is up, its URL, and what it prints. Raises RuntimeError with that when it does not come up."""
    port, output = free_range(1), Path(scratch) / "serve.log"
    command = [sys.executable, "-m", "cluster.cli", "serve", model, "--ray-address", address, "--port", str(port), "--replicas", "1"]
    command += ["--tensor-parallel-size", "2", "--replica-cpus", "1", "--placement-strategy", "SPREAD", "--served-model-name", "tiny"]
    command += ["--dtype", "float32", "--num-threads", "1", "--num-gpu-blocks-override", "64", "--queue-time-slo-s", "300"]
    command += ["--device", "cpu"]
    with output.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT)
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while "curl " not in output.read_text():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(output.read_text())
            time.sleep(0.2)
        yield process, f"http://127.0.0.1:{port}", output
    finally:
        if process.poll() is None:
            process.kill()


def chat(url: str, body: str) -> Any:
    request = urllib.request.Request(f"{url}/v1/chat/completions", body.encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def rank_parents() -> list[int]:
    """Of the processes of rank 0, which is the replica, and rank 1."""
    below = processes.living(os.getpid())
    found = {}
    for process in below:
        title = Path(f"/proc/{process.pid}/cmdline").read_text().replace("\0", " ")
        parent = int(Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        if title.startswith("ray::ServeReplica:tiny:Replica"):
            found[0] = parent
        elif title.startswith("ray::tiny:Rank1"):
            found[1] = parent
    return [found[rank] for rank in sorted(found)]


def served(model: str, body: str, address: str, scratch: str) -> dict[str, Any]:
    with serving(model, address, scratch) as (process, url, output):
        (group,) = groups()
        found = {"nodes": list(group["bundles_to_node_id"].values()), "parents": rank_parents(), "answer": chat(url, body)}
        process.send_signal(signal.SIGTERM)
        found |= {"status": process.wait(STOP_TIMEOUT_S), "output": output.read_text()}
    return found | {"groups left": len(groups())}


def results(model: str, body: str, scratch: str) -> dict[str, Any]:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for resources in ({"num_gpus": 0, "include_dashboard": False}, *[{"num_gpus": 2}] * 2):
            cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, **resources)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        return {"doctor": doctor(), "served": served(model, body, cluster.address, scratch)}
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="rt", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        token = os.path.join(scratch, "token")
        with open(token, "w") as file:
            file.write(os.urandom(32).hex())
        os.environ |= {"RAY_TMPDIR": scratch, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token}  # read when ray is imported
        with contextlib.redirect_stdout(sys.stderr):
            found = results(sys.argv[1], sys.argv[2], scratch)
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
