"""One replica whose two ranks are on two raylets answers a chat with what one rank computes, and leaves nothing on the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replica.config import EngineConfig
from replica.runner import ModelRunner
from tests.cluster.tiny_served import CHAT_PROMPT, CHAT_TOKENS
from tests.replica.model_driver import Driver, greedy


def from_one_rank(model: Path) -> list[int]:
    runner = ModelRunner(EngineConfig(model=str(model), dtype="float32", num_gpu_blocks_override=64, num_threads=1))
    try:
        return Driver(runner).generate([CHAT_PROMPT], greedy(CHAT_TOKENS))
    finally:
        runner.close()


@pytest.mark.cluster
@pytest.mark.alone
@pytest.mark.slow
def test_a_replica_over_two_raylets_answers_as_one_rank_does(on_nodes: dict[str, Any]) -> None:
    found = on_nodes["served"]
    assert len(found["nodes"]) == len(set(found["nodes"])) == 2, found
    assert len(found["parents"]) == len(set(found["parents"])) == 2, found
    (choice,) = found["answer"]["choices"]
    assert choice["token_ids"] == from_one_rank(Path(on_nodes["model"]))
    assert found["status"] == 0, found["output"]
    assert found["groups left"] == 0
