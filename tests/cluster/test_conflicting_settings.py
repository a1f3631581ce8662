"""Settings that exclude each other are refused before anything starts: what a replica would say, from the same rule."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster import preflight, serve_command
from cluster.config import Config, parse
from kernels import ops
from kernels.names import KERNELS_VARIABLE, TRITON
from replica import conflict, held_model, step_choice
from replica.contract.model_error import ModelError
from replica.contract.model_files import resolve
from replica.models.config import read_model_config
from replica.models.model_config import ModelConfig
from tests.replica.tiny_families import write_family

SETTINGS: dict[str, tuple[Any, ...]] = {
    "dtype": ("auto", "float32"),
    "quantization": (None, "w4a8", "w8a16", "fp8"),
    "kv_cache_dtype": ("auto", "int8"),
    "batch_invariant": (False, True),
    "tensor_parallel_size": (1, 2),
    "block_size": (16, 8),
    "device": ("cpu", "cuda"),
}
NEEDS, BFLOAT16, ONE_RANK = "needs the C++ step", "it takes --dtype bfloat16", "it takes --tensor-parallel-size 1"
KERNELS = ("", "cpu", "reference", "triton", "nonsense")


@pytest.fixture
def any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a machine may lack is there: a compiler, a GPU, Triton. What is refused then is refused by the settings."""
    monkeypatch.setattr(step_choice, "best_library", lambda *_: (SimpleNamespace(title="AVX2"), Path("step.so"), ""))
    monkeypatch.setattr(step_choice, "load_library", lambda path: SimpleNamespace())
    monkeypatch.setattr(step_choice, "computes_bfloat16", lambda device: True)
    monkeypatch.setattr(ops, "_triton", lambda device: dataclasses.replace(ops.REFERENCE, name=TRITON))
    monkeypatch.setattr(preflight, "_GPU_FILES", ("/dev/null",))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def models(directory: Path) -> list[ModelConfig]:
    sound = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    written = [write_family(directory / "dense", "llama", **sound), write_family(directory / "moe", "qwen3-moe")]
    dense, moe = (read_model_config(resolve(str(each))) for each in written)
    return [dense, moe, dataclasses.replace(dense, intermediate_size=100)]


def by_replica(config: Config, model: ModelConfig) -> str:
    try:
        held_model._choose(config.engine, model, torch.device(config.engine.device))
    except ModelError as error:
        return str(error).removeprefix(f"{config.engine.model}: ")
    return ""


def disagreements(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], set[str]]:
    """Where both are asked and say something else; and all that was refused."""
    wrong, refused = [], set()
    choices = [dict(zip(SETTINGS, values, strict=True)) for values in product(*SETTINGS.values())]
    for model, kernels, choice in product(models(directory), KERNELS, choices):
        monkeypatch.setenv(KERNELS_VARIABLE, kernels)
        config = Config.model_validate({"engine": choice})
        said, before = by_replica(config, model), preflight.unusable(config, model)
        refused |= {said} - {""}
        if said != before:
            wrong.append(f"{kernels} {choice}: {said!r} by a replica, {before!r} before")
    return wrong, refused


@pytest.mark.usefixtures("any_machine")
def test_what_a_replica_refuses_by_its_settings_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, refused = disagreements(tmp_path, monkeypatch)
    assert not wrong, "\n".join(wrong[:5])
    assert len(refused) > 30 and all("\n" not in line for line in refused)


@pytest.mark.usefixtures("any_machine")
@pytest.mark.parametrize("rule", ["misnamed", "_weights_alone", "_without_cpp_step", "_batch_invariance"])
def test_a_rule_of_the_replica_alone_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """The control: the replica goes by all of its rules, the front by all but one."""
    all_rules, kept = conflict.conflict, getattr(conflict, rule)

    def without(*asked: Any) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(conflict, rule, lambda *_: "")
            return all_rules(*asked)

    monkeypatch.setattr(preflight, "conflict", without)
    assert getattr(conflict, rule) is kept and disagreements(tmp_path, monkeypatch)[0]


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"dtype": "float32", "kv_cache_dtype": "int8"}, f"--kv-cache-dtype int8 {NEEDS}: the dtype is float32, not bfloat16; {BFLOAT16}"),
        ({"tensor_parallel_size": 3, "quantization": "w4a8"}, f"--quantization w4a8 {NEEDS}: 3 ranks share the model; {ONE_RANK}"),
        ({"quantization": "fp8"}, "--quantization fp8 is computed by Triton's kernels on a GPU; on a CPU the C++ step has w8a8 and w4a8"),
        ({"device": "cuda"}, "--device cuda: there is no GPU on this machine"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2 does not divide attention heads (9), KV heads (3); sizes that work: 1, 3"),
        ({"max_model_len": 9000}, "max_model_len 9000 exceeds the model's context of 8192 tokens"),
        ({"max_model_len": 8000, "num_gpu_blocks_override": 10}, "max_model_len 8000 does not fit the KV pool of 160 tokens"),
    ],
)
def test_serve_refuses_them_in_one_line_without_ray(
    engine: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
    monkeypatch.setattr(preflight, "_GPU_FILES", ("/nowhere",))
    monkeypatch.setattr(serve_command.Signals, "install", lambda self: None)
    monkeypatch.setattr(serve_command, "_serve", lambda *_: pytest.fail("Ray is started"))
    monkeypatch.setattr(serve_command, "take_port", lambda *_: SimpleNamespace(close=lambda: None))
    assert serve_command.run(parse({"engine": engine})) == serve_command.EXIT_USAGE
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and line.startswith(f"rantang: {said}")


def test_a_cluster_that_is_joined_is_believed_what_it_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes may have GPUs and an environment of their own; what no node could compute is refused all the same."""
    monkeypatch.setattr(preflight, "_GPU_FILES", ("/nowhere",))
    dense = models(tmp_path)[0]

    def refusal(address: str | None, **engine: Any) -> str:
        return preflight.unusable(Config.model_validate({"engine": engine, "serve": {"ray_address": address}}), dense)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for engine in ({"quantization": "fp8"}, {"device": "cuda"}):
        assert refusal(None, **engine) and not refusal("10.0.0.1:6379", **engine)
    assert "it takes --dtype bfloat16" in refusal("10.0.0.1:6379", quantization="w4a8", dtype="float32")
