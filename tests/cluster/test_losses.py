"""A replica that is lost is one line, with what it may be for; what goes on or never was a replica is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster import local_ray, serve_command
from cluster.config import Config
from cluster.losses import Losses, Lost, line
from cluster.stages import Stages

REPLICA, RANK, ROUTER = "ray::ServeReplica:smollm2:Replica", "ray::smollm2:Rank1", "ray::ServeReplica:smollm2:Router"
OOM = 'oom_context { error_message: "Task was killed due to the node running low on memory." }'


def test_who_has_gone_is_told_once_and_together() -> None:
    losses = Losses()
    all_of_them = {1: REPLICA, 2: RANK, 3: REPLICA, 4: ROUTER, 5: "ray::IDLE", 6: "/usr/bin/raylet --node_ip_address=127.0.0.1"}
    assert losses.observe(all_of_them) == ()
    assert losses.observe({pid: title for pid, title in all_of_them.items() if pid not in (2, 5)}) == ()
    assert losses.observe({3: REPLICA, 4: ROUTER, 9: "ray::IDLE"}) == (), "its replica ends a moment later"
    assert losses.observe({3: REPLICA, 4: ROUTER, 9: REPLICA}) == (Lost(2, "Rank1"), Lost(1, "Replica"))
    assert losses.observe({3: REPLICA, 9: REPLICA, 10: RANK + ".__init__"}) == ()
    losses.observe({3: REPLICA, 9: REPLICA})
    assert losses.observe({3: REPLICA, 9: REPLICA}) == (Lost(10, "Rank1"),), "also while it starts, when its title ends with a method"
    assert losses.observe({3: REPLICA, 9: REPLICA}) == () and losses.observe({3: REPLICA, 9: REPLICA}) == (), "a router is none"


def test_what_is_still_a_worker_without_a_title_is_not_lost() -> None:
    losses = Losses()
    assert not any(losses.observe({1: title}) for title in ("ray::IDLE", "ray::", "", ":", REPLICA, REPLICA))


def test_the_line_says_who_and_what_to_do() -> None:
    lost = (Lost(2, "Rank1"), Lost(1, "Replica"))
    said = line(lost, {})
    assert "\n" not in said and "a replica is lost, Rank1 (process 2), Replica (process 1);" in said and "if the machine's memory" in said
    assert "Ray ended it because the machine's memory was nearly full: fewer --replicas" in line(lost, {2: OOM})
    assert "Ray ended it" not in line(lost, {7: OOM}), "another's"


@pytest.mark.parametrize("said", [local_ray._SAID_BY_US, ()])
def test_what_ray_says_of_it_is_not_said_again_and_all_else_is_a_line(said: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """On a cluster that is joined nobody else says it."""
    texts = [
        "A worker died or was killed while executing a task by an unexpected system error." + " To troubleshoot,\n" * 99,
        "Infeasible\nas it is",
    ]
    local_ray._pass_on({"lines": texts, "pid": "raylet", "is_err": False}, ignore_prefix=False, said_by_us=said)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "rantang: Ray: Infeasible as it is" and len(lines) == 1 + (not said) and max(map(len, lines)) < 330


def test_serve_says_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of processes that it sees going; Ray is asked why, once, about these alone."""
    seen = [{1: REPLICA, 2: RANK, 3: REPLICA}, {3: REPLICA}, {3: REPLICA, 9: REPLICA}, {3: REPLICA, 9: REPLICA}]
    asked: list[list[int]] = []
    monkeypatch.setattr(serve_command, "_start_ray", lambda *_: True)
    monkeypatch.setattr(serve_command, "_start_application", lambda *_, **__: None)
    monkeypatch.setattr(serve_command.processes, "living", lambda *_, **__: [])
    monkeypatch.setattr(serve_command.processes, "titles", lambda alive: seen.pop(0))
    monkeypatch.setattr(serve_command.local_ray, "causes_of_death", lambda pids: asked.append(pids) or {2: OOM})
    monkeypatch.setattr(serve_command.deployment, "take_down", lambda *_, **__: True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    signals: Any = SimpleNamespace(started=lambda: None, go_on=lambda: None, wait=lambda timeout_s: not seen, asked_to_hurry=False)
    guardian: Any = SimpleNamespace(pid=0, watch=lambda pids: None)
    directory: Any = None
    assert serve_command._serve(Config(), signals, Stages(), directory, guardian) == serve_command.EXIT_OK
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "Replica (process 1), Rank1 (process 2)" in said[0] and "Ray ended it" in said[0]
    assert asked == [[1, 2]]
