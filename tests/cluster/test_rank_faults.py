"""What keeps ranks from starting is one line with the rank and the reason, whoever noticed it first."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster import rank_actors
from cluster.deployment import failure
from cluster.doctor_command import _last_line
from cluster.rank_actors import RankActors, RankError, Whereabouts
from kernels.ops import KernelError, choose_device


class Told(RankActors):
    """Ranks whose lives end with what is given, after so many looks."""

    def __init__(self, ended: str, looks: int = 0) -> None:
        super().__init__([], [])
        self.ended, self.looks = ended, looks

    def check(self) -> None:
        self.looks -= 1
        if self.ended and self.looks < 0:
            raise RankError(self.ended)


@pytest.mark.parametrize(
    ("noticed", "ranks", "said"),
    [
        ("rank 1: no shard", Told("rank 1 failed: later"), "rank 1: no shard"),
        (
            "rank 2 differs from rank 0: weights 'a' (rank 0: 'b')",
            Told("rank 2 failed: x"),
            "rank 2 differs from rank 0: weights 'a' (rank 0: 'b')",
        ),
        (
            "rank 0 of 2: Connection reset by peer",
            Told("rank 1 failed: GLOO_SOCKET_IFNAME=x", looks=2),
            "rank 1 failed: GLOO_SOCKET_IFNAME=x",
        ),
        ("rank 0 of 2: Connection\n reset by peer", Told(""), "rank 0 of 2: Connection reset by peer"),
    ],
)
def test_a_ranks_own_words_come_first(monkeypatch: pytest.MonkeyPatch, noticed: str, ranks: Any, said: str) -> None:
    monkeypatch.setattr(rank_actors, "_POLL_S", 0.01)
    monkeypatch.setattr(rank_actors, "_WHY_TIMEOUT_S", 0.1)
    assert str(asyncio.run(ranks.why(RuntimeError(noticed)))) == said


def test_the_command_prints_the_rank_and_the_reason_alone() -> None:
    message = "Traceback (most recent call last):\n  File x\ncluster.rank_actors.RankError: rank 1: no shard\n"
    error = failure([message])
    assert str(error) == "rank 1: no shard" and not error.see_logs


def test_a_gpu_that_is_not_there_is_said() -> None:
    with pytest.raises(KernelError, match=r"device cuda: torch .* sees no GPU \(CUDA_VISIBLE_DEVICES="):
        choose_device(0, "cuda") if not __import__("torch").cuda.is_available() else pytest.skip("there is one")
    assert choose_device(3, "cpu").type == "cpu"


def test_the_doctor_names_a_cause_without_its_class() -> None:
    assert _last_line(ValueError("ray::x\nTraceback\nreplica.parallel.step_channel.GroupBroken: rank 1 of 2: gone")) == "rank 1 of 2: gone"
    assert _last_line(ValueError("rank 1: gone")) == "rank 1: gone"


def test_only_processes_that_are_still_the_ranks_are_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    killed: list[int] = []
    monkeypatch.setattr(rank_actors.os, "kill", lambda pid, number: killed.append(pid))
    monkeypatch.setattr(rank_actors, "start_of", lambda pid: f"start of {pid}")

    class Context:
        def get_node_id(self) -> str:
            return "here"

    monkeypatch.setattr(rank_actors.ray, "get_runtime_context", Context)
    ranks = Told("")
    ranks.whereabouts = {
        1: Whereabouts(11, "start of 11", "here", None),
        2: Whereabouts(12, "another start", "here", None),  # the number belongs to somebody else now
        3: Whereabouts(13, "start of 13", "elsewhere", None),
        4: Whereabouts(14, None, "here", None),
    }
    ranks.kill()
    assert killed == [11]
