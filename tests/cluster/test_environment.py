"""Two clusters on one machine share nothing by which one could answer for the other."""

from __future__ import annotations

import io
import socket
from pathlib import Path

from rich.console import Console

from cluster.config import Config
from cluster.environment import ROUTER_PORTS, free_range, serve_environment
from cluster.stages import Stages

# The ports that Serve itself would take, the same in every cluster (ray.serve._private.constants).
SERVES_OWN = {"8500", "9500", "30000", "31000", "9101", "8404"}


def ports(variables: dict[str, str]) -> set[str]:
    return {value for name, value in variables.items() if name.endswith("_PORT")}


def test_every_port_is_this_clusters_own() -> None:
    one = ports(serve_environment(Config(), haproxy=Path("haproxy"), scratch=Path("a")))
    assert len(one) == 6, "fallback HTTP and gRPC, HAProxy's metrics and statistics, first and last router"
    assert not one & SERVES_OWN


def test_no_port_is_one_that_the_kernel_gives_to_connections() -> None:
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for haproxy in (Path("haproxy"), None):
        variables = serve_environment(Config(), haproxy=haproxy, scratch=Path("a"))
        chosen = {int(port) for name, port in variables.items() if name.endswith("_PORT")} - {8000, 8001}
        assert chosen and max(chosen) < given


def test_a_range_is_free_and_goes_round_what_is_not() -> None:
    first = free_range(8)
    for port in range(first, first + 8):
        with socket.socket() as one:
            one.bind(("", port))
    assert free_range(ROUTER_PORTS) + ROUTER_PORTS <= 30_000


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, _text: str) -> int:
        raise OSError(5, "Input/output error")


def test_a_closed_terminal_stops_nothing() -> None:
    show = Stages(Console(file=Gone()))
    with show.stage("draining"):
        show.note = "on"
    show.say("drained")
