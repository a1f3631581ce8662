"""What the drill of lost ranks judges: what it must find is planted, and what is in order must pass."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import pytest

from bench.drills import rank_loss
from bench.drills.rank_loss import Holding, Loss
from bench.drills.ray_state import RayState
from bench.processes import Process
from bench.record import Outcome, RequestRecord

HOLDS = Holding(6, RayState(2, {"CPU": 0.6}), 40)
WELL = RequestRecord(0.0, outcome=Outcome.COMPLETED)
LOSS = Loss("kill a rank", (WELL,), (), 0, 0.5, 1.0, 15.0)


def broken(*losses: Loss, after: Holding = HOLDS, left: int = 0) -> list[str]:
    return [metric.name for metric in rank_loss.report(list(losses), HOLDS, after, left, {}).metrics if metric.holds is False]


def test_a_stack_that_is_whole_again_holds() -> None:
    assert broken(LOSS, replace(LOSS, fault="freeze a rank", moved_after_s=2.8, replaced_after_s=24.0)) == []


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (replace(LOSS, disturbed=(replace(WELL, outcome=Outcome.ERROR),)), ["lost"]),
        (replace(LOSS, doubled=1), ["doubled"]),
        (replace(LOSS, moved_after_s=2.1), ["moved_after_worst"]),
        (replace(LOSS, moved_after_s=None), ["moved_after_worst"]),
        (replace(LOSS, fault="freeze a rank", moved_after_s=3.1), ["moved_after_freeze_worst"]),
        (replace(LOSS, replaced_after_s=20.1), ["replaced_after_worst"]),
        (replace(LOSS, replaced_after_s=None), ["replaced_after_worst"]),
        (replace(LOSS, fault="freeze a rank", replaced_after_s=25.1), ["replaced_after_freeze_worst"]),
    ],
)
def test_one_bad_loss_of_several_is_found(loss: Loss, names: list[str]) -> None:
    assert broken(LOSS, loss, LOSS) == names


@pytest.mark.parametrize(
    ("after", "left", "name"),
    [
        (replace(HOLDS, ranks=7), 0, "ranks_left_over"),
        (replace(HOLDS, ray=RayState(3, {"CPU": 0.6})), 0, "placement_groups_leaked"),
        (replace(HOLDS, ray=RayState(2, {"CPU": 0.7})), 0, "cpus_leaked"),
        (replace(HOLDS, ports=41), 0, "ports_leaked"),
        (HOLDS, 1, "processes_after_stop"),
    ],
)
def test_what_is_left_behind_is_found(after: Holding, left: int, name: str) -> None:
    assert broken(LOSS, after=after, left=left) == [name]


def test_a_listening_port_of_the_family_is_counted_and_no_other() -> None:
    me = Process(os.getpid(), 0, "", "")
    before = rank_loss.listening_ports([me])
    with socket.create_server(("127.0.0.1", 0)):
        assert rank_loss.listening_ports([me]) == before + 1
        assert rank_loss.listening_ports([]) == 0


def test_a_router_that_does_not_answer_is_asked_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert not rank_loss._all_serve(f"http://127.0.0.1:{port}")
