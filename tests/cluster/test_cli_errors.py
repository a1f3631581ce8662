"""What a user gets wrong: one clear line on stderr, a status that is not 0, no traceback, and nothing left running."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import processes

ROOT = Path(__file__).parents[2]


def rantang(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **environment}
    env.pop("RAY_ADDRESS", None)
    return subprocess.run([sys.executable, "-m", "cluster.cli", *arguments], capture_output=True, text=True, timeout=120, env=env, cwd=ROOT)


def assert_one_line(result: subprocess.CompletedProcess[str], status: int, *parts: str) -> None:
    lines = result.stderr.splitlines()
    assert result.returncode == status, result.stderr
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("rantang: ")
    assert "Traceback" not in result.stderr + result.stdout
    for part in parts:
        assert part in lines[0]
    assert not [process for process in processes.descendants(os.getpid()) if process.name in ("raylet", "gcs_server")]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen(1)
        yield one.getsockname()[1]


def test_a_path_that_does_not_exist() -> None:
    assert_one_line(rantang("serve", "/nowhere/model", "--port", "18999"), 1, "/nowhere/model: no such file or directory")


def test_a_checkpoint_without_config(tmp_path: Path) -> None:
    assert_one_line(rantang("serve", str(tmp_path), "--port", "18999"), 1, "no config.json")


def test_a_checkpoint_whose_weights_are_broken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{ not json at all")
    assert_one_line(rantang("serve", str(tmp_path), "--port", "18999"), 1, "model.safetensors")


def test_a_truncated_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert_one_line(rantang("serve", str(file), "--port", "18999"), 1, "model.gguf")


def test_a_port_that_is_taken(taken_port: int) -> None:
    result = rantang("serve", "--runner", "mock", "--port", str(taken_port))
    assert_one_line(result, 1, f"port {taken_port} on 127.0.0.1 is taken", "--port")


def test_an_unknown_host() -> None:
    assert_one_line(rantang("serve", "--runner", "mock", "--host", "no-such-host.invalid"), 1, "--host no-such-host.invalid")


def test_an_unknown_key_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("engine: {max_num_seq: 3}\n")
    assert_one_line(rantang("serve", "--config", str(file)), 2, "unknown key 'engine.max_num_seq'", "did you mean 'engine.max_num_seqs'?")


def test_an_unknown_flag() -> None:
    assert_one_line(rantang("serve", "--max-num-seq", "3"), 2, "--max-num-seq", "--max-num-seqs")


def test_a_value_of_the_wrong_type() -> None:
    assert_one_line(rantang("serve", "--replicas", "two"), 2, "serve.replicas", "'two'")


def test_the_model_given_twice() -> None:
    assert_one_line(rantang("serve", "a", "--model", "b"), 2, "the model is given twice")


def test_an_unknown_command() -> None:
    assert_one_line(rantang("sevre"), 2, "sevre")


def test_chat_without_a_server() -> None:
    assert_one_line(rantang("chat", "--url", "http://127.0.0.1:9", "-m", "hi"), 1, "no server at http://127.0.0.1:9")


def test_a_ray_that_cannot_be_joined() -> None:
    result = rantang("serve", "--runner", "mock", "--ray-address", "nonsense")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "rantang: " in result.stderr


@pytest.mark.parametrize("module", ["cluster.serve_command", "cluster.doctor_command", "cluster.rank_actors"])
def test_commands_that_start_a_ray_do_not_import_it_before_its_environment_is_set(module: str) -> None:
    """The last one is no command but the control: it does, and whatever imports it."""
    code = f"import sys, {module}; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(module == "cluster.rank_actors")


def test_help_is_quick_and_imports_neither_ray_nor_torch() -> None:
    code = (
        "import sys; from cluster.cli import cli\n"
        "try: cli(['serve', '--help'], standalone_mode=False)\n"
        "finally: print({m for m in ('ray', 'torch', 'starlette', 'httpx') if m in sys.modules}, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT
    )
    assert result.stderr.strip() == "set()"
    for flag in ("--max-num-seqs", "--kv-cache-memory-bytes", "--enable-prefix-caching", "--api-key", "--port", "--config"):
        assert flag in result.stdout


def test_version_is_one_word_and_a_number() -> None:
    result = rantang("version")
    assert (result.returncode, result.stdout.split()[0]) == (0, "rantang")


def test_a_context_beyond_the_models() -> None:
    result = rantang("serve", "--max-model-len", "100000", "--port", "18999")
    assert_one_line(result, 2, "max_model_len 100000 exceeds the model's context of 8192 tokens")
    assert "ray" not in result.stdout  # before anything was started


@pytest.mark.parametrize("size", ["2", "4", "9"])
def test_a_number_of_ranks_that_does_not_divide_the_model(size: str) -> None:
    assert_one_line(rantang("serve", "--tensor-parallel-size", size, "--port", "18999"), 2, "sizes that work: 1, 3")
