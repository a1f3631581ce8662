"""Two clusters of one machine do not meet."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cluster import environment
from cluster.config import parse
from cluster.environment import free_block, serve_environment

ROUTERS = ("RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT")
FALLBACK = ("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT")


def ports_behind_haproxy(scratch: Path) -> set[int]:
    variables = serve_environment(parse({}), haproxy=Path("haproxy"), scratch=scratch)
    least, end = (int(variables[name]) for name in ROUTERS)
    assert end - least >= 100
    fallback = {int(variables[name]) for name in FALLBACK}
    assert len(fallback) == 2 and not fallback & set(range(least, end))
    return fallback | set(range(least, end))


def test_what_haproxy_speaks_to_listens_on_ports_of_this_cluster_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's proxies share their port with whoever else listens there: the requests of one cluster reached the other."""
    starts = iter((0, 5_000))
    monkeypatch.setattr(environment.secrets, "randbelow", lambda limit: next(starts))
    monkeypatch.setattr(environment, "_is_free", lambda port: True)
    one, other = ports_behind_haproxy(tmp_path / "one"), ports_behind_haproxy(tmp_path / "other")
    assert not one & other
    assert not {8500, 9500, 30_000} & (one | other)  # Serve's own choice, the same for every cluster


def test_a_block_with_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_block(16)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 7))
        taken.listen()
        starts = iter((first, first + 8, first))
        monkeypatch.setattr(environment.secrets, "randbelow", lambda limit: next(starts) - 20_000)
        assert free_block(8) == first + 8
        monkeypatch.setattr(environment.secrets, "randbelow", lambda limit: first - 20_000)
        with pytest.raises(OSError, match="no 8 free ports"):
            free_block(8)
