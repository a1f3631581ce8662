"""Who is there, told in order whatever thread says so."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import membership
from router.link import Member

Members = tuple[Member, ...]


class Handle:
    """As much of a DeploymentHandle as `follow` uses."""

    deployment_id = "app#Replica"

    def options(self, **_: Any) -> SimpleNamespace:
        return SimpleNamespace()


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_known", {})
    monkeypatch.setattr(membership, "_listeners", {})


def announce(*names: str) -> None:
    membership.announce(Handle.deployment_id, {name: membership.publish("127.0.0.1", 1) for name in names})


def test_changes_are_heard_once_and_in_order() -> None:
    heard: list[list[str]] = []
    announce("a")
    membership.follow(Handle(), lambda members: heard.append([one.replica_id for one in members]))  # type: ignore[arg-type]
    announce("a")
    announce("b", "a")
    announce()
    assert heard == [["a"], ["a", "b"], []]


def test_a_change_while_the_first_is_told_comes_after_it() -> None:
    heard: list[list[str]] = []
    later = threading.Thread(target=announce, args=("b",))

    def listener(members: Members) -> None:
        if members[0].replica_id == "a":
            later.start()
            later.join(0.2)
        heard.append([one.replica_id for one in members])

    announce("a")
    membership.follow(Handle(), listener)  # type: ignore[arg-type]
    later.join(10)
    assert heard == [["a"], ["b"]]
