"""Ranks on several nodes: raylets of one machine with made-up GPUs. Each rank sees its own GPU, and the doctor says what is wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cluster import placement
from cluster.config import Config

RANK = re.compile(r"rank (\d): ok, \S+ \(node (\w+)\), cpu \(CUDA_VISIBLE_DEVICES=(\d)\), gloo on \w+, torch")


def config(size: int = 2, engine: dict[str, Any] | None = None, **serve: Any) -> Config:
    return Config.model_validate({"engine": {"tensor_parallel_size": size, **(engine or {})}, "serve": {"replicas": 1, **serve}})


def test_a_bundle_per_rank_of_what_is_reserved() -> None:
    assert placement.bundles(config(3, replica_cpus=2), 0) == [{"CPU": 2.0}] * 3
    assert placement.bundles(config(3), 0) is None
    assert placement.bundles(config(1, replica_cpus=2), 8) is None
    assert placement.bundles(config(2, replica_cpus=1), 8) == [{"CPU": 1.0, "GPU": 1.0}] * 2  # a cluster with GPUs
    assert placement.bundles(config(2, {"device": "cpu"}, replica_cpus=1), 8) == [{"CPU": 1.0}] * 2
    assert placement.bundles(config(2, replica_gpus=0.5), 0) == [{"GPU": 0.5}] * 2


@pytest.mark.parametrize(
    ("wanted", "nodes", "said"),
    [
        (config(2, replica_gpus=1), [{"GPU": 2.0}], ""),
        (config(4, replica_gpus=1), [{"GPU": 2.0}, {"GPU": 2.0}], "rank 2 of 4 has no device: each rank takes 1 GPU, placed STRICT_PACK"),
        (config(4, replica_gpus=1, placement_strategy="PACK"), [{"GPU": 2.0}, {"GPU": 2.0}], ""),
        (config(5, replica_gpus=1, placement_strategy="PACK"), [{"GPU": 2.0}, {"GPU": 2.0}], "rank 4 of 5 has no device"),
        (config(2, replica_gpus=1, replicas=3), [{"GPU": 3.0}, {"GPU": 2.0}], "room for 2 of 3 replicas"),
        (
            config(2, replica_cpus=2, replica_gpus=1),
            [{"GPU": 8.0, "CPU": 3.0}],
            "rank 1 of 2 has no device: each rank takes 2 CPU and 1 GPU",
        ),
        (
            config(2, placement_strategy="SPREAD"),
            [{"CPU": 8.0}],
            "placement_strategy SPREAD takes effect with replica_cpus or replica_gpus",
        ),
        (config(2), [{"CPU": 8.0}], ""),
        (config(3, replica_gpus=0.1), [{"GPU": 0.3}], ""),  # 0.3 // 0.1 is 2
        (config(4, replica_gpus=0.1), [{"GPU": 0.3}], "rank 3 of 4 has no device"),
    ],
)
def test_more_ranks_than_devices_are_refused_in_one_line(wanted: Config, nodes: list[dict[str, float]], said: str) -> None:
    problem = placement.contradiction(wanted, sum(node.get("GPU", 0.0) for node in nodes)) or placement.shortage(wanted, nodes)
    assert problem.startswith(said) and bool(problem) == bool(said), problem
    assert "\n" not in problem


def test_more_cpus_than_cores_are_told() -> None:
    said = placement.overcommitment(config(3, replicas=2, replica_cpus=0.5), 2)
    assert said == "serve.replica_cpus: 6 rank(s) of 0.5 CPUs each share the 2 cores of this machine"
    assert placement.overcommitment(config(3, replicas=2, replica_cpus=0.5), 3) == ""
    assert placement.overcommitment(config(3, replicas=2), 1) == "", "nothing is reserved"


@pytest.mark.cluster
@pytest.mark.alone
@pytest.mark.slow
def test_ranks_on_nodes_of_their_own_see_their_own_gpu(on_nodes: dict[str, Any]) -> None:
    results = on_nodes["doctor"]
    for case, nodes, devices in (("packed", 1, {"0", "1"}), ("spread", 2, {"0"})):
        status, lines = results[case]
        ranks = [found.groups() for line in lines if (found := RANK.match(line))]
        assert status == 0 and [rank for rank, _, _ in ranks] == ["0", "1"], lines
        assert len({node for _, node, _ in ranks}) == nodes, lines
        assert {device for _, _, device in ranks} <= devices and len({(node, device) for _, node, device in ranks}) == 2, lines
        assert sum("GB/s" in line for line in lines) == 3, lines
    assert results["too many"][0] == 1 and "rank 2 of 3 has no device" in results["too many"][1][-1]
    assert results["far too many"][0] == 1 and "rank 4 of 5 has no device" in results["far too many"][1][-1]
    assert results["groups left"] == 0
