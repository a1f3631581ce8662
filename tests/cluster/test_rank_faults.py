"""What keeps ranks from starting is one line with the rank and the reason, whoever noticed it first."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from cluster import doctor_command, rank_actors
from cluster.config import Config
from cluster.deployment import check_placement, failure
from cluster.preflight import StartError
from cluster.rank_actors import RankActors, RankError, Whereabouts, last_line
from kernels.ops import KernelError, choose_device
from replica.config import EngineConfig


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
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: what is said without one cannot be seen")
    with pytest.raises(KernelError, match=r"device cuda: torch .* sees no GPU \(CUDA_VISIBLE_DEVICES="):
        choose_device(0, "cuda")


def test_the_cpu_may_be_chosen_anywhere() -> None:
    assert choose_device(3, "cpu").type == "cpu"


def test_the_doctor_names_a_cause_without_its_class() -> None:
    assert last_line(ValueError("ray::x\nTraceback\nreplica.parallel.step_channel.GroupBroken: rank 1 of 2: gone")) == "rank 1 of 2: gone"
    assert last_line(ValueError("rank 1: gone")) == "rank 1: gone"


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


def test_a_parent_that_went_before_the_kernel_was_asked_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(rank_actors.os, "kill", lambda pid, number: killed.append((pid, number)))
    monkeypatch.setattr(rank_actors.ctypes, "CDLL", lambda name: SimpleNamespace(prctl=lambda *arguments: 0))
    parents = iter((77, 77, 77, 1))
    monkeypatch.setattr(rank_actors.os, "getppid", lambda: next(parents))
    rank_actors.die_with_parent()
    assert killed == []
    rank_actors.die_with_parent()
    assert killed == [(rank_actors.os.getpid(), signal.SIGKILL)]


class Placed:
    """An actor that Ray places after `looks`; its beat says so."""

    def __init__(self, events: list[str], name: str, fault: Exception | None = None) -> None:
        self.beat = self.run = SimpleNamespace(remote=lambda *arguments: self.called(arguments))
        self.events, self.name, self.fault = events, name, fault

    def called(self, arguments: tuple[Any, ...]) -> Any:
        async def beats() -> None:
            await asyncio.sleep(0.02)
            if self.fault is not None:
                raise self.fault
            self.events.append(f"{self.name} runs")

        if arguments:
            self.events.append(f"{self.name} joins")
            return None
        return beats()


def started(monkeypatch: pytest.MonkeyPatch, events: list[str], fault: Exception | None) -> None:
    monkeypatch.setattr(rank_actors, "_create", lambda config, rank, replica_id: Placed(events, f"rank {rank}", fault))
    monkeypatch.setattr(rank_actors, "join_group", lambda *arguments: events.append("rank 0 joins"))
    asyncio.run(RankActors.start(EngineConfig(tensor_parallel_size=3), "one", "127.0.0.1"))


def test_the_deadline_for_joining_begins_when_all_ranks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    started(monkeypatch, events, None)
    assert events == ["rank 1 runs", "rank 2 runs", "rank 1 joins", "rank 2 joins", "rank 0 joins"]
    with pytest.raises(RankError, match="rank 1 failed: ValueError"):
        started(monkeypatch, events, ValueError())


def test_a_cluster_that_is_joined_may_grow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}}])
    wanted = {"engine": {"tensor_parallel_size": 2}, "serve": {"replica_gpus": 1, "replicas": 1}}
    with pytest.raises(StartError, match="rank 1 of 2 has no device"):
        check_placement(Config.model_validate(wanted))
    wanted["serve"]["ray_address"] = "10.0.0.1:6379"
    check_placement(Config.model_validate(wanted))
    assert re.match(r"rantang: warning: rank 1 of 2 has no device: .*; Ray waits until nodes", capsys.readouterr().err)


def test_the_doctor_leaves_a_cluster_that_it_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []
    monkeypatch.setattr(doctor_command.local_ray, "join", lambda config, address: None)
    monkeypatch.setattr(doctor_command.local_ray, "stop", lambda: stopped.append(True))
    config = Config.model_validate({"serve": {"ray_address": "10.0.0.1:6379"}})
    with pytest.raises(KeyboardInterrupt), doctor_command._ray(config):
        raise KeyboardInterrupt
    assert stopped == [True]
