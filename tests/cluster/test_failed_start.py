"""A start that fails leaves nothing on a cluster that was joined."""

from __future__ import annotations

import socket

import pytest

from cluster import deployment, local_ray, serve_command
from cluster.config import Config, parse
from cluster.preflight import StartError


@pytest.mark.parametrize(("address", "withdrawn"), [("10.0.0.1:6379", 1), (None, 0)])
def test_the_application_is_withdrawn(monkeypatch: pytest.MonkeyPatch, address: str | None, withdrawn: int) -> None:
    """One of our own ends as a whole."""
    calls: list[Config] = []

    def fail(*_: object, **__: object) -> None:
        raise StartError("the replicas were not ready")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(serve_command, "_start_ray", lambda *_: True)
    monkeypatch.setattr(serve_command, "_start_application", fail)
    monkeypatch.setattr(serve_command, "take_port", lambda *_: socket.socket())
    monkeypatch.setattr(serve_command, "find_cluster", lambda *_: None)
    monkeypatch.setattr(serve_command.Signals, "install", lambda self: None)
    monkeypatch.setattr(local_ray, "stop", lambda: None)
    monkeypatch.setattr(serve_command.processes, "end_descendants", lambda *_, **__: 0)
    monkeypatch.setattr(deployment, "withdraw", calls.append)
    config = parse({"engine": {"runner": "mock"}, "serve": {"ray_address": address} if address else {}})
    assert serve_command.run(config) == serve_command.EXIT_FAILED
    assert len(calls) == withdrawn
