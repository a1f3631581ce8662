"""A Ray of our own on this machine, or a connection to one that runs already."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cluster import environment, stages
from cluster.config import Config
from cluster.cores import usable_cores
from cluster.mortal import mortal
from cluster.run_directory import RunDirectory

OBJECT_STORE_BYTES = 80_000_000  # Ray's least; tokens never pass through it
GCS = "gcs_server"
RAYLET = "raylet"
_SAID_BY_US = ("A worker died or was killed", "killed due to memory pressure")
_SHOWN_MAX = 300  # letters


def joined_address(config: Config) -> str | None:
    """The running cluster to join, from the configuration or RAY_ADDRESS; None: start one."""
    return config.serve.ray_address or os.environ.get("RAY_ADDRESS") or None


def prepare(config: Config, run: RunDirectory) -> bool:
    """Set the environment of a local cluster. True if HAProxy serves. Call before anything imports ray."""
    binary = environment.find_haproxy() if config.serve.haproxy else None
    haproxy = mortal(binary, run.path / "haproxy") if binary is not None else None
    variables = environment.serve_environment(config, haproxy=haproxy, scratch=run.path)
    if not any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(run.write_token())}
    environment.apply(variables)
    return haproxy is not None


def start(config: Config, run: RunDirectory) -> None:
    """Start Ray under `run`. Its processes end with this one, even when this one is killed. Raises what ray.init raises."""
    import ray

    serving = config.serve
    cores = usable_cores()
    ranks = serving.replicas * config.engine.tensor_parallel_size
    ray.init(
        address="local",
        num_cpus=max(cores, math.ceil(ranks * serving.replica_cpus + serving.routers * serving.router_cpus)),
        include_dashboard=serving.dashboard,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=serving.log_level == "debug",
        logging_level=_level(config),
        configure_logging=True,
        _temp_dir=str(run.path / "ray"),
    )
    (run.path / "ray-address").write_text(ray.get_runtime_context().gcs_address)  # for `ray status` and other drivers, with the token
    _quiet(config)


def join(config: Config, address: str) -> None:
    """Connect to a running cluster. Raises ConnectionError (or what ray.init raises)."""
    import ray

    ray.init(address=address, log_to_driver=config.serve.log_level == "debug", logging_level=_level(config))
    _quiet(config)


def connected() -> bool:
    ray = sys.modules.get("ray")
    return bool(ray is not None and ray.is_initialized())


def causes_of_death(pids: Collection[int]) -> dict[int, str]:
    """Ray's words for why these actors' processes ended, where it has any; {} where it cannot be asked."""
    import ray

    try:
        actors = ray._private.state.actors().values()
    except Exception:  # only for a line to people
        return {}
    return {actor["Pid"]: str(actor["DeathCause"]) for actor in actors if actor["Pid"] in pids}


def stop() -> None:
    """Disconnect, and end a Ray that `start` began."""
    ray = sys.modules.get("ray")
    if ray is not None:
        ray.shutdown()


def session_logs(run: RunDirectory) -> Path:
    return run.path / "ray" / "session_latest" / "logs"


def _level(config: Config) -> int:
    return int(getattr(logging, config.serve.log_level.upper())) if config.serve.log_level == "debug" else logging.ERROR


def _quiet(config: Config) -> None:
    """Ray's own loggers in this process say errors only; importing ray.serve first, because that sets its logger to INFO."""
    from ray import serve  # noqa: F401

    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(_level(config))
    if config.serve.log_level != "debug":
        from ray._private import worker

        worker.print_to_stdstream = partial(_pass_on, said_by_us=_SAID_BY_US if joined_address(config) is None else ())


def _pass_on(data: Mapping[str, Any], *_: object, said_by_us: tuple[str, ...], **__: object) -> None:
    """What Ray's raylets tell a driver, pages of it, as a line each; nothing of what `rantang serve` says itself (cluster.losses)."""
    for text in data["lines"]:
        if not any(part in text for part in said_by_us):
            stages.error(f"Ray: {' '.join(text.split())[:_SHOWN_MAX]}")
