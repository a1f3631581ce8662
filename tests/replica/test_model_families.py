"""Every architecture against transformers' own implementation in float32: cold, chunked, with reuse, preempted, batched, sharded."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replica.config import EngineConfig
from replica.contract.model_error import ModelError
from replica.forward import TorchForward
from replica.runner import ModelRunner
from replica.step import BlockCopy, Draw, Row, Step
from tests.replica.model_driver import Driver, greedy
from tests.replica.thread_ranks import Rank, Ranks
from tests.replica.tiny_families import FAMILIES, family_logits, write_family
from tests.replica.tiny_gguf import gguf_of_checkpoint

TOKENS = [(7 * i * i + 3 * i) % 130 + 1 for i in range(90)]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def runner_of(directory: Path, **changes: Any) -> ModelRunner:
    config = {"dtype": "float32", "num_gpu_blocks_override": 64, "num_threads": 1, **changes}
    return ModelRunner(EngineConfig(model=str(directory), **config))


class Family:
    """One architecture: our runner and transformers' logits of TOKENS."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.directory = write_family(directory, name)
        self.runner = runner_of(self.directory)
        self.expected = family_logits(self.directory, TOKENS)

    def agrees(self, logits: torch.Tensor, length: int) -> bool:
        """`logits` are transformers' for what follows the first `length` tokens."""
        return bool((logits - self.expected[length - 1]).abs().max() < 1e-4)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp(request.param), request.param)


def row(start: int, stop: int, blocks: list[int], *, draws: bool = True) -> Row:
    return Row(0, TOKENS[start:stop], start, blocks, Draw(greedy(), 0, TOKENS[:stop], ()) if draws else None)


def test_cold(family: Family) -> None:
    for length in (1, 15, 16, 17, 24, 25, 90):
        assert family.agrees(family.runner.forward(Step(0, (row(0, length, [5, 9, 2, 40, 41, 3]),)))[0], length), length


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_chunked(family: Family, chunk: int) -> None:
    for start in range(0, 90, chunk):
        stop = min(90, start + chunk)
        assert family.agrees(family.runner.forward(Step(0, (row(start, stop, [33, 4, 60, 11, 12, 0]),)))[0], stop), (start, stop)


def test_warm(family: Family) -> None:
    """Another request's pages, the last of them copied and only one of its tokens recomputed."""
    family.runner.forward(Step(0, (row(0, 90, [8, 13, 21, 34, 55, 1]),)))
    shared = [8, 13, 21, 50, 51, 52]
    assert family.agrees(family.runner.forward(Step(1, (row(63, 64, shared),), (BlockCopy(34, 50),)))[0], 64)
    assert family.agrees(family.runner.forward(Step(2, (row(64, 90, shared),)))[0], 90)


def test_preempted(family: Family) -> None:
    """Half computed, its pages given to another, then computed again elsewhere."""
    family.runner.forward(Step(0, (row(0, 50, [1, 2, 3, 4]),)))
    stranger = Row(7, [9] * 60, 0, [1, 2, 3, 4], Draw(greedy(), 0, [9] * 60, ()))
    family.runner.forward(Step(1, (stranger, row(0, 30, [20, 21, 22, 23, 24, 25], draws=False))))
    assert family.agrees(family.runner.forward(Step(2, (row(30, 90, [20, 21, 22, 23, 24, 25]),)))[0], 90)


def test_batched(family: Family) -> None:
    """Decodes of very different lengths, a chunk with context and a cold prompt in one step, over strangers' pages."""
    long, short, chunk = [1, 2, 3, 4, 5, 6], [7], [8, 9, 10, 11]
    family.runner.forward(Step(0, (row(0, 89, long, draws=False), row(0, 4, short, draws=False), row(0, 20, chunk))))
    rows = (
        row(4, 5, short),
        row(20, 50, chunk),
        row(0, 33, [20, 21, 22]),
        row(0, 12, [30], draws=False),
        row(89, 90, long),
        row(0, 1, [31]),
    )
    logits = family.runner.forward(Step(1, rows))
    for got, length in zip(logits, (5, 50, 33, 90, 1), strict=True):
        assert family.agrees(got, length), length


def on_ranks(directory: Path, size: int, work: Callable[[ModelRunner], torch.Tensor], **changes: Any) -> list[torch.Tensor]:
    """What `work` returns on every rank of a replica of `size`."""
    ranks = Ranks(size)
    results: dict[int, torch.Tensor] = {}

    def run(rank: int) -> None:
        config = EngineConfig(model=str(directory), dtype="float32", num_gpu_blocks_override=64, num_threads=1, **changes)
        results[rank] = work(ModelRunner(config, tp=Rank(ranks, rank)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(size)]


def test_two_ranks_sum_up_to_the_whole(family: Family) -> None:
    def work(runner: ModelRunner) -> torch.Tensor:
        runner.forward(Step(0, (row(0, 40, [3, 1, 4, 15], draws=False), row(0, 9, [9]))))
        return runner.forward(Step(1, (row(40, 60, [3, 1, 4, 15]), row(9, 10, [9])))).clone()

    for logits in on_ranks(family.directory, 2, work):
        assert family.agrees(logits[0], 60) and family.agrees(logits[1], 10)


def test_greedy_ids_are_transformers_own(family: Family) -> None:
    """Decoded token by token over our cache, far beyond the window; every choice is the largest of transformers' logits."""
    output = Driver(family.runner, shuffle=4).generate(TOKENS[:30], greedy(30), chunk=11)
    logits = family_logits(family.directory, TOKENS[:30] + output)[29:-1]
    picked = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    assert bool((logits.amax(-1) - picked).max() < 1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("rope", "served"),
    [
        ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, {}),
        ({"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, **LLAMA3}, {}),
        (YARN, {}),
        ({**YARN, "rope_theta": 500.0, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}, {}),
        ({**YARN, "attention_factor": 1.3}, {}),
        ({**YARN, "mscale": 0.7, "mscale_all_dim": 1.4}, {}),
        (DYNAMIC, {}),
        (DYNAMIC, {"max_model_len": 90}),  # theta follows the served context: transformers' for a sequence of that length
    ],
    ids=["linear", "llama3", "yarn", "yarn bounds", "yarn attention factor", "yarn mscale", "dynamic", "dynamic beyond"],
)
def test_rope_scalings(tmp_path: Path, name: str, rope: dict[str, Any], served: dict[str, Any]) -> None:
    context = 64 if rope is DYNAMIC else 96
    directory = write_family(tmp_path, name, rope_parameters=rope, max_position_embeddings=context)
    runner = runner_of(directory, **served)
    length = min(90, runner.limits.max_model_len)
    blocks = [3, 1, 4, 15, 9, 2]
    runner.forward(Step(0, (row(0, length - 20, blocks, draws=False),)))
    logits = runner.forward(Step(1, (row(length - 20, length, blocks),)))
    assert bool((logits[0] - family_logits(directory, TOKENS[:length])[length - 1]).abs().max() < 1e-4)


@pytest.mark.parametrize(("name", "kind"), [("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_gguf_files_of_a_family(tmp_path: Path, name: str, kind: str) -> None:
    directory = write_family(tmp_path / "dir", name, rope_parameters=YARN)
    runner = runner_of(gguf_of_checkpoint(directory, tmp_path / "m.gguf", kind))
    logits = runner.forward(Step(0, (row(0, 90, [3, 1, 4, 15, 9, 2]),)))
    assert bool((logits[0] - family_logits(directory, TOKENS)[-1]).abs().max() < 1e-4)


def test_yarn_and_dynamic_scaling_decide_the_context(tmp_path: Path) -> None:
    yarn = runner_of(write_family(tmp_path / "yarn", "llama", rope_parameters=YARN, max_position_embeddings=64))
    assert yarn.limits.max_model_len == 128
    directory = write_family(tmp_path / "dynamic", "llama", rope_parameters=DYNAMIC, max_position_embeddings=64)
    assert runner_of(directory).limits.max_model_len == 64
    assert runner_of(directory, max_model_len=192).limits.max_model_len == 192
    with pytest.raises(ModelError, match="max_model_len 193 exceeds the model's context of 192"):
        runner_of(directory, max_model_len=193)


def test_the_comparison_sees_what_sets_a_family_apart(tmp_path: Path) -> None:
    """Each is taken away once; the logits are then far from transformers'."""
    for name, change in (
        ("mistral", {"sliding_window": 25}),
        ("qwen2-windowed", {"max_window_layers": 2}),
        ("llama", {"rms_norm_eps": 0.1}),
    ):
        family = Family(tmp_path / name, name)
        config = family.directory / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **change, "layer_types": None}))
        logits = runner_of(family.directory).forward(Step(0, (row(0, 90, [5, 9, 2, 40, 41, 3]),)))[0]
        assert not family.agrees(logits, 90), name
    family = Family(tmp_path / "qwen3", "qwen3")
    forward = family.runner._held.forward
    assert isinstance(forward, TorchForward)
    layers = forward.model.layers
    object.__setattr__(layers[0], "head_norms", None)
    assert not family.agrees(family.runner.forward(Step(0, (row(0, 90, [5, 9, 2, 40, 41, 3]),)))[0], 90)


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize("renormalize", [True, False])
def test_weights_of_experts_with_and_without_renormalising(tmp_path: Path, renormalize: bool) -> None:
    directory = write_family(tmp_path, "qwen3-moe", norm_topk_prob=renormalize)
    logits = runner_of(directory).forward(Step(0, (row(0, 40, [5, 9, 2]),)))[0]
    assert float((logits - family_logits(directory, TOKENS[:40])[-1]).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [1]}, r"mlp_only_layers \[1\] is not supported with experts \(\[\] is\)"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported with experts"),
        ({"use_sliding_window": True}, "use_sliding_window True is not supported with experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, of 6 experts"),
        ({"moe_intermediate_size": 40}, r"tensor model.layers.0.mlp.experts.0.gate_proj.weight has the shape \[32, 48\]"),
    ],
)
def test_mixtures_that_are_not_served_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    directory = write_family(tmp_path, "qwen3-moe")
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **EXPERTS, **changes}))
    with pytest.raises(ModelError, match=message):
        runner_of(directory)


def test_experts_are_not_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANTANG_KERNELS", "reference")
    with pytest.raises(ModelError, match="quantization w4a16: experts are served in the model's dtype only"):
        runner_of(write_family(tmp_path, "qwen3-moe"), quantization="w4a16")
    monkeypatch.delenv("RANTANG_KERNELS")
    with pytest.raises(ModelError, match=r"w4a8 needs the C\+\+ step: its feed-forward layers are experts"):
        runner_of(tmp_path, dtype="bfloat16", quantization="w4a8")
