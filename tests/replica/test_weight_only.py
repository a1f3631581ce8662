"""Weights of eight and four bits for activations of sixteen: what is read of a file, a rank's part, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.reference.quantized_weight import QuantizedWeight, dequantize, quantize_fp8, quantize_int4, quantize_int8
from replica import held_model
from replica.config import WEIGHT_ONLY, EngineConfig
from replica.contract.model_error import ModelError
from replica.contract.model_files import resolve
from replica.models import loader_gguf
from replica.models.config import read_model_config
from replica.models.gguf_groups import groups_of, held_as
from replica.models.loader import open_source
from replica.models.loader_gguf import GgufSource
from replica.models.weight_only import Piece, read_quantized
from replica.models.weight_source import Part, WeightSource
from replica.parallel.group import SingleRank
from replica.runner import ModelRunner
from replica.step_choice import choose_step
from tests.replica.model_driver import Driver, greedy
from tests.replica.thread_ranks import lead
from tests.replica.tiny_families import write_family
from tests.replica.tiny_gguf import write_llama_gguf

KINDS = gguf.GGMLQuantizationType
CPU = torch.device("cpu")
QUANTIZE: dict[str, Callable[[Tensor], QuantizedWeight]] = {"w8a16": quantize_int8, "w4a16": quantize_int4, "fp8": quantize_fp8}
SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
}  # whole groups of a half
QUERY, GATE, UP, DOWN = (f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))


def gguf_source(directory: Path, kind: KINDS) -> WeightSource:
    write_llama_gguf(directory / "m.gguf", kind, **SIZES)
    files = resolve(str(directory / "m.gguf"))
    return open_source(files, read_model_config(files))


def config_of(model: Path, **changes: Any) -> EngineConfig:
    return EngineConfig.model_validate(
        {"model": str(model), "dtype": "float32", "num_gpu_blocks_override": 40, "num_threads": 1, **changes}
    )


@pytest.mark.parametrize(("kind", "quantization"), [(KINDS.Q8_0, "w8a16"), (KINDS.Q4_1, "w4a16"), (KINDS.Q4_0, "w4a16")])
def test_blocks_of_that_width_are_those_of_the_file(kind: KINDS, quantization: str, tmp_path: Path) -> None:
    source = gguf_source(tmp_path, kind)
    for name in (QUERY, DOWN):  # rows of queries lie in another order in the file
        held = dequantize(read_quantized(source, [Piece(name)], quantization, CPU))
        assert torch.equal(held.bfloat16(), source.read(name).bfloat16()), "which rounds to bfloat16"


@pytest.mark.parametrize("quantization", WEIGHT_ONLY)
def test_others_are_quantised_here(quantization: str, tmp_path: Path) -> None:
    source = gguf_source(tmp_path, KINDS.F32)
    joined = read_quantized(source, [Piece(GATE), Piece(UP)], quantization, CPU)
    assert torch.equal(dequantize(joined), dequantize(QUANTIZE[quantization](torch.cat((source.read(GATE), source.read(UP))))))
    assert joined.rows == 2 * SIZES["intermediate_size"] and joined.columns == SIZES["hidden_size"]


@pytest.mark.parametrize("kind", [KINDS.Q8_0, KINDS.Q4_1])
def test_a_ranks_part_is_a_part_of_the_whole(kind: KINDS, tmp_path: Path) -> None:
    source, quantization = gguf_source(tmp_path, kind), "w8a16" if kind is KINDS.Q8_0 else "w4a16"
    rows, width = SIZES["hidden_size"], SIZES["intermediate_size"]
    whole = dequantize(read_quantized(source, [Piece(DOWN)], quantization, CPU))
    second = Part(1, 2)
    assert torch.equal(dequantize(read_quantized(source, [Piece(DOWN, columns=second)], quantization, CPU)), whole[:, width // 2 :])
    assert torch.equal(dequantize(read_quantized(source, [Piece(DOWN, rows=second)], quantization, CPU)), whole[rows // 2 :])
    cut = dequantize(read_quantized(source, [Piece(DOWN, columns=Part(3, 4))], quantization, CPU))  # 48 columns: within a group
    assert cut.shape == (rows, width // 4)
    assert 0 < float((cut - whole[:, -48:]).norm() / whole[:, -48:].norm()) < (0.01 if quantization == "w8a16" else 0.1)


def test_blocks_that_cannot_be_used_are_not_decoded_nor_more_than_a_ranks_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = gguf_source(tmp_path, KINDS.Q8_0)
    decoded: list[tuple[int, ...]] = []
    monkeypatch.setattr(loader_gguf, "groups_of", lambda raw, kind: decoded.append(raw.shape) or groups_of(raw, kind))
    rows, width = SIZES["hidden_size"], SIZES["intermediate_size"]
    read_quantized(source, [Piece(DOWN)], "w4a16", CPU)
    assert decoded == []
    read_quantized(source, [Piece(DOWN, columns=Part(1, 2))], "w8a16", CPU)
    read_quantized(source, [Piece(DOWN, rows=Part(1, 2))], "w8a16", CPU)
    assert decoded == [(rows, width // 64, 34), (rows // 2, width // 32, 34)]


@pytest.mark.parametrize("permuted", [False, True])
def test_a_part_of_a_matrix_is_a_part_of_its_groups(permuted: bool, tmp_path: Path) -> None:
    """Q4_K: halves and quarters of three blocks of 256 cut blocks. Rows of queries lie in another order in the file."""
    raw = np.random.default_rng(0).integers(0, 256, (64, 3, 144), dtype=np.uint8)
    raw[:, :, :4] = np.full((64, 3, 2), 0.01, np.float16).view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", raw.reshape(64, -1), raw_dtype=KINDS.Q4_K)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    config: Any = SimpleNamespace(architecture="LlamaForCausalLM" if permuted else "Qwen2ForCausalLM", head_dim=32)
    files: Any = SimpleNamespace(gguf=tmp_path / "m.gguf")
    source = GgufSource(files, config)
    whole = source.groups(QUERY)
    assert whole is not None and whole.m is not None and whole.q.shape == (64, 24, 32)
    assert source.groups(QUERY, bits=8) is None
    for rows, columns in ((Part(1, 2), Part(1, 2)), (Part(0, 2), Part(0, 4)), (Part(1, 2), Part(2, 4))):
        part = source.groups(QUERY, rows=rows, columns=columns, bits=4)
        assert part is not None and part.m is not None
        down, across = rows.of(64), columns.of(24)
        for found, meant in ((part.q, whole.q), (part.d, whole.d), (part.m, whole.m)):
            assert torch.equal(found, meant[down, across])


@pytest.mark.parametrize("quantization", WEIGHT_ONLY[:2])
def test_two_ranks_say_what_one_says(quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By groups, of which each lies in one rank; fp8 has another scale for each rank's part of a row."""
    monkeypatch.setenv("RANTANG_KERNELS", "reference")
    directory = write_family(tmp_path, "llama", **SIZES)
    alone = config_of(directory, quantization=quantization)

    def answer(runner: Any) -> list[int]:
        return Driver(runner).generate([5, 9, 77, 3], greedy(20))

    def make(tp: Any) -> ModelRunner:
        return ModelRunner(config_of(directory, quantization=quantization, tensor_parallel_size=2), tp=tp)

    assert lead(2, make, answer) == answer(ModelRunner(alone))


def test_what_nothing_computes_is_refused_with_what_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_family(tmp_path, "llama", **SIZES)
    for forced in ("", "cpu"):
        monkeypatch.setenv("RANTANG_KERNELS", forced)
        with pytest.raises(ModelError, match=r"fp8 is computed by Triton's kernels on a GPU; on a CPU the C\+\+ step has w8a8 and w4a8"):
            ModelRunner(config_of(directory, quantization="fp8"))
    monkeypatch.delenv("RANTANG_KERNELS")
    model = read_model_config(resolve(str(directory)))
    with pytest.raises(ModelError, match=r"w4a8 needs the C\+\+ step: it runs on cuda \(on a GPU there are w8a16, w4a16, fp8\)"):
        choose_step(config_of(directory, quantization="w4a8"), model, torch.device("cuda"))


def test_people_are_told_what_became_of_a_files_blocks() -> None:
    kinds = {"token_embd.weight": "Q8_0", "blk.0.attn_q.weight": "Q8_0", "blk.0.attn_k.weight": "Q4_K", "blk.0.attn_norm.weight": "F32"}
    assert held_as(kinds, "w8a16") == "Q8_0 as in the file, Q8_0 dequantised, Q4_K quantised anew"
    assert held_as(kinds, "w4a16") == "Q8_0 dequantised, Q8_0 quantised anew, Q4_K scales to the nearest"
    assert held_as(kinds, "fp8") == "Q8_0 dequantised, Q4_K Q8_0 quantised anew"


def test_people_are_told_on_a_gpu_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds the model there is a stand-in: what is said is made before."""
    monkeypatch.setenv("RANTANG_KERNELS", "reference")
    monkeypatch.setattr(held_model, "_device", lambda config, rank: torch.device("cuda", 0))
    read: list[WeightSource] = []

    def held(place: Any, files: Any, source: WeightSource) -> tuple[Any, Any]:
        read.append(source)
        return SimpleNamespace(pool=None), None

    monkeypatch.setattr(held_model, "hold_on_device", held)
    write_llama_gguf(tmp_path / "m.gguf", KINDS.Q8_0, **SIZES)
    found = held_model.hold_model(config_of(tmp_path / "m.gguf", quantization="w8a16"), SingleRank(), held_model.Stages(None))
    assert found.kernels.endswith("; weights Q8_0 as in the file, Q8_0 dequantised") and read[0].has(QUERY)


def test_experts_are_promised_nothing_that_they_cannot_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_family(tmp_path, "qwen3-moe")
    model = read_model_config(resolve(str(directory)))
    monkeypatch.delenv("RANTANG_KERNELS", raising=False)
    hint = "(the C++ step is 2 to 3 times as fast)"
    dense = dataclasses.replace(model, mixture=None)
    assert hint in choose_step(config_of(directory), dense, CPU).reason
    assert hint not in choose_step(config_of(directory), model, CPU).reason
    with pytest.raises(ModelError, match="quantization w4a16: experts are served in the model's dtype only"):
        choose_step(config_of(directory, quantization="w4a16"), model, CPU)
    with pytest.raises(ModelError, match=r"w4a8 needs the C\+\+ step: it runs on cuda$"):
        choose_step(config_of(directory, quantization="w4a8"), model, torch.device("cuda"))
