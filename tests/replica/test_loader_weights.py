"""Weights from GGUF and safetensors: right values, and only a rank's part."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config import Config
from cluster.preflight import StartError, find_model
from kernels.ops import REFERENCE
from replica.config import EngineConfig
from replica.contract.model_error import ModelError
from replica.contract.model_files import resolve
from replica.linear import Linear, VocabularyHead, pack
from replica.models.config import read_model_config
from replica.models.loader import Placement, load_model, open_source
from replica.models.loader_gguf import GgufSource
from replica.models.loader_safetensors import SafetensorsSource
from replica.models.model_config import shard_problem
from replica.models.weight_source import Part, WeightSource
from replica.parallel.card import RankCard
from replica.parallel.group import SingleRank
from replica.runner import ModelRunner
from replica.step import Row, Step
from tests.replica.model_driver import Driver, greedy
from tests.replica.tiny_gguf import write_llama_gguf
from tests.replica.tiny_llama import write_tiny_llama

KINDS = gguf.GGMLQuantizationType
WIDE = {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16, "intermediate_size": 192}  # whole blocks of 32


class Rank:
    """A member of a group whose collectives are not called."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("loading needs no collective")

    all_gather_last_dim = all_reduce

    def agree(self, own: RankCard) -> None:
        """The others are not there."""


@pytest.mark.parametrize(
    ("kind", "error"), [(KINDS.F32, 0), (KINDS.F16, 1e-3), (KINDS.BF16, 4e-3), (KINDS.Q8_0, 1e-2), (KINDS.Q4_1, 1e-1), (KINDS.Q4_0, 1.5e-1)]
)
def test_gguf_values(tmp_path: Path, kind: KINDS, error: float) -> None:
    meant = write_llama_gguf(tmp_path / "m.gguf", kind, **WIDE)
    files = resolve(str(tmp_path / "m.gguf"))
    source = GgufSource(files, read_model_config(files))
    for name, right in meant.items():
        assert source.has(name) and source.shape(name) == tuple(right.shape)
        read = source.read(name).float()
        assert float((read - right).norm() / right.norm()) <= error, name
        if kind in (KINDS.Q8_0, KINDS.Q4_1) and right.ndim > 1:
            assert torch.equal(read, read.bfloat16().float()), "the same model in every dtype"


def test_gguf_serves_what_safetensors_serve(tmp_path: Path) -> None:
    write_llama_gguf(tmp_path / "m.gguf", KINDS.F32)
    write_tiny_llama(tmp_path / "dir")
    outputs = []
    for model in (tmp_path / "m.gguf", tmp_path / "dir"):
        runner = ModelRunner(EngineConfig(model=str(model), dtype="float32", num_gpu_blocks_override=9, num_threads=1))
        assert runner.eos_token_ids == {2} and runner.limits.max_model_len == 144
        outputs.append(Driver(runner).generate([5, 9, 77, 3], greedy(20)))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_parts_put_together_are_the_whole(tmp_path: Path, form: str) -> None:
    if form == "gguf":
        write_llama_gguf(tmp_path / "m.gguf", KINDS.Q8_0, **WIDE)
        source: WeightSource = GgufSource(files := resolve(str(tmp_path / "m.gguf")), read_model_config(files))
    else:
        source = SafetensorsSource(resolve(str(write_tiny_llama(tmp_path, shards=2))))
    stem = "model.layers.1"
    for name in (
        f"{stem}.self_attn.q_proj.weight",
        f"{stem}.self_attn.k_proj.weight",
        f"{stem}.mlp.up_proj.weight",
        "model.embed_tokens.weight",
    ):
        assert torch.equal(torch.cat([source.read(name, rows=Part(i, 3)) for i in range(3)]), source.read(name)), name
    for name in (f"{stem}.self_attn.o_proj.weight", f"{stem}.mlp.down_proj.weight"):
        parts = [source.read(name, columns=Part(i, 3)) for i in range(3)]
        assert torch.equal(torch.cat(parts, dim=1), source.read(name)), name


def test_a_rank_reads_no_more_than_its_part(tmp_path: Path) -> None:
    files = resolve(str(write_tiny_llama(tmp_path)))
    config = read_model_config(files)

    def elements_read(tp: Rank | SingleRank) -> int:
        source = open_source(files, config)
        total = 0

        class Counting:
            has, shape, close = source.has, source.shape, source.close

            def read(self, name: str, **parts: Part) -> torch.Tensor:
                nonlocal total
                tensor = source.read(name, **parts)
                total += tensor.numel()
                return tensor

        load_model(config, Counting(), Placement(torch.float32, torch.device("cpu"), tp, REFERENCE, 64))
        return total

    norms = 48 * (2 * 3 + 1)
    whole = elements_read(SingleRank()) - norms
    assert [3 * (elements_read(Rank(rank, 3)) - norms) for rank in range(3)] == [whole] * 3


def test_sizes_that_do_not_divide_are_refused_with_those_that_do(tmp_path: Path) -> None:
    config = read_model_config(resolve("smollm2"))
    assert shard_problem(config, 1) == shard_problem(config, 3) == ""
    for size, reason in ((2, "heads (9)"), (4, "KV heads (3)"), (9, "vocabulary (49152)")):
        problem = shard_problem(config, size)
        assert reason in problem and problem.endswith("sizes that work: 1, 3")
    with pytest.raises(ModelError, match="sizes that work: 1, 3"):
        ModelRunner(EngineConfig(model="smollm2"), tp=Rank(0, 2))


def rewritten(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """The checkpoint with other tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


STEM = "model.layers.1.self_attn"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop(f"{STEM}.v_proj.weight"), f"tensor {STEM}.v_proj.weight is missing (LlamaForCausalLM has one)"),
        (lambda t: t.pop("model.norm.weight"), "tensor model.norm.weight is missing"),
        (
            lambda t: t.update({f"{STEM}.o_proj.weight": torch.zeros(48, 47)}),
            f"{STEM}.o_proj.weight has the shape [48, 47]; the configuration says [48, 48]",
        ),
        (lambda t: t.update({f"{STEM}.q_proj.bias": torch.zeros(48)}), f"{STEM}.q_proj.bias has no place in LlamaForCausalLM"),
        (
            lambda t: t.update({"model.layers.3.input_layernorm.weight": torch.zeros(48)}),
            "model.layers.3.input_layernorm.weight has no place",
        ),
    ],
    ids=["missing", "missing at the top", "misshapen", "unknown", "a layer too many"],
)
def test_tensors_are_checked_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, torch.Tensor]], None], reason: str
) -> None:
    monkeypatch.setattr("replica.held_model.load_model", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr("replica.held_model._empty_pool", lambda *_: pytest.fail("the pool was taken"))
    directory = rewritten(write_tiny_llama(tmp_path), change)
    with pytest.raises(ModelError, match=re.escape(reason)):
        ModelRunner(EngineConfig(model=str(directory)))
    with pytest.raises(StartError, match=re.escape(reason)):  # and before anything of a cluster is started
        find_model(Config.model_validate({"engine": {"model": str(directory)}}))


def test_tables_that_some_files_carry_along_are_ignored(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        tensors["lm_head.weight"] = torch.zeros(132, 48)  # tied: the embedding serves

    plain, more = write_tiny_llama(tmp_path / "a"), rewritten(write_tiny_llama(tmp_path / "b"), change)
    outputs = [
        Driver(ModelRunner(EngineConfig(model=str(model), dtype="float32", num_gpu_blocks_override=9))).generate([5, 9], greedy(9))
        for model in (plain, more)
    ]
    assert outputs[0] == outputs[1]


def test_a_gguf_names_its_own_tensors(tmp_path: Path) -> None:
    write_llama_gguf(tmp_path / "m.gguf", KINDS.F32)
    raw = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw.replace(b"blk.1.attn_k.weight", b"blk.1.attn_z.weight"))
    with pytest.raises(ModelError, match=r"tensor blk\.1\.attn_k\.weight is missing"):
        ModelRunner(EngineConfig(model=str(tmp_path / "m.gguf")))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}},
            "'longrope' is not supported .supported: linear, dynamic, llama3, yarn",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"num_key_value_heads": 4}, "4 KV heads do not divide 6"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear': KeyError.'factor'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": -1}}, "'yarn': ValueError.*not a positive number"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}}, "not below high_freq"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters is not one set of numbers"),
        ({"rope_parameters": None, "rope_scaling": "yarn"}, "rope_scaling is not one set of numbers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized checkpoints"),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8, "layer_types": ["x"]},
            "layer_types are not 3 of sliding_attention and full_attention",
        ),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    import json

    write_tiny_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match=reason):
        read_model_config(resolve(str(tmp_path)))


def test_end_tokens_and_theta_are_found_where_checkpoints_keep_them(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, rope_parameters=None, rope_theta=1234.0, eos_token_id=[2, 3])
    assert (read_model_config(resolve(str(tmp_path))).rope_theta, read_model_config(resolve(str(tmp_path))).eos_token_ids) == (
        1234.0,
        {2, 3},
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_model_config(resolve(str(tmp_path))).eos_token_ids == {7, 8}
    smollm2 = read_model_config(resolve("smollm2"))
    assert (smollm2.rope_theta, smollm2.tied_embeddings, smollm2.max_model_len, smollm2.eos_token_ids) == (100_000.0, True, 8192, {2})


def test_packed_linear_equals_plain() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(40, 24), torch.randn(40), torch.randn(5, 24).bfloat16()
    right = x.double() @ weight.bfloat16().double().T + bias.bfloat16().double()
    linear = Linear(weight.bfloat16(), bias.bfloat16())
    assert float((linear(x).double() - right).norm() / right.norm()) < 5e-3
    assert pack(weight) is None and not Linear(weight).is_packed
    assert torch.equal(Linear(weight, bias)(x.float()), torch.nn.functional.linear(x.float(), weight, bias))


def test_head_is_as_good_as_float32_and_one_pass_would_not_be() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(500, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    right = x.double() @ weight.double().T
    head = VocabularyHead(weight, SingleRank())
    if not head.is_packed:
        pytest.skip("this CPU packs no bfloat16")
    assert float((head(x) - right).abs().max()) < 1e-3
    assert float((Linear(weight)(x).double() - right).abs().max()) > 1e-2


def test_steps_with_unused_rows_of_every_kind(tmp_path: Path) -> None:
    runner = ModelRunner(EngineConfig(model=str(write_tiny_llama(tmp_path)), dtype="float32", num_gpu_blocks_override=9, num_threads=1))
    assert runner.execute(Step(5, ())).outcomes == ()
    outcome = runner.execute(Step(6, (Row(0, [1, 2, 3], 0, [4], None),))).outcomes[0]
    assert outcome.token is None and outcome.error == "" and outcome.scores == ()
