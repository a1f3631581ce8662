"""One replica whose two ranks are on two raylets answers a chat with what one rank computes, and leaves nothing on the cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replica.config import EngineConfig
from replica.runner import ModelRunner
from tests.cluster.tiny_served import write_tiny_served
from tests.replica.model_driver import Driver, greedy

ROOT = Path(__file__).parents[2]
TOKENS = 24
PROMPT = 77


def from_one_rank(model: Path) -> list[int]:
    runner = ModelRunner(EngineConfig(model=str(model), dtype="float32", num_gpu_blocks_override=64, num_threads=1))
    try:
        return Driver(runner).generate([PROMPT], greedy(TOKENS))
    finally:
        runner.close()


@pytest.mark.cluster
@pytest.mark.slow
def test_a_replica_over_two_raylets_answers_as_one_rank_does(tmp_path: Path) -> None:
    model = write_tiny_served(tmp_path / "model")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}"}))
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": f"t{PROMPT}"}], "temperature": 0}
    body |= {"max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    script = Path(__file__).with_name("served_nodes_driver.py")
    command = [sys.executable, str(script), str(model), json.dumps(body)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["nodes"]) == len(set(found["nodes"])) == 2, found
    assert len(found["parents"]) == len(set(found["parents"])) == 2, found
    (choice,) = found["answer"]["choices"]
    assert choice["token_ids"] == from_one_rank(model)
    assert found["status"] == 0, found["output"]
    assert found["groups left"] == 0
