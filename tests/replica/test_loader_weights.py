"""Weights from GGUF and safetensors: right values, and only a rank's part."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from kernels.ops import REFERENCE
from replica.config import EngineConfig
from replica.contract.model_error import ModelError
from replica.contract.model_files import resolve
from replica.linear import Linear, VocabularyHead, pack
from replica.models.config import read_model_config, shard_problem
from replica.models.loader import Placement, load_model, open_source
from replica.models.loader_gguf import GgufSource
from replica.models.loader_safetensors import SafetensorsSource
from replica.models.weight_source import Part, WeightSource
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


@pytest.mark.parametrize(
    ("kind", "error"), [(KINDS.F32, 0), (KINDS.F16, 1e-3), (KINDS.BF16, 4e-3), (KINDS.Q8_0, 1e-2), (KINDS.Q4_1, 1e-1), (KINDS.Q4_0, 1.5e-1)]
)
def test_gguf_values(tmp_path: Path, kind: KINDS, error: float) -> None:
    meant = write_llama_gguf(tmp_path / "m.gguf", kind, **WIDE)
    files = resolve(str(tmp_path / "m.gguf"))
    source = GgufSource(files, 16)
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
        source: WeightSource = GgufSource(resolve(str(tmp_path / "m.gguf")), 16)
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


def test_missing_and_misshapen_tensors(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, num_hidden_layers=2)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(ModelError, match=r"model\.layers\.2\..* is missing"):
        ModelRunner(EngineConfig(model=str(tmp_path)))
    (tmp_path / "config.json").write_text(config.replace('"vocab_size": 132', '"vocab_size": 133'))
    with pytest.raises(ModelError, match=r"embed_tokens\.weight has the shape \[132, 48\]; the configuration says \[133, 48\]"):
        ModelRunner(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"num_key_value_heads": 4}, "4 KV heads do not divide 6"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
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
