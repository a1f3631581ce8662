"""A runner on the C++ step: the same as torch's in what it says, and why one of them serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from kernels.cpu import build
from kernels.cpu.packed import Groups, dequantise, quantise_q4, quantise_q8
from replica.config import EngineConfig
from replica.contract.model_error import ModelError
from replica.contract.model_files import resolve
from replica.models.config import read_model_config
from replica.models.gguf_groups import groups_of, held_as
from replica.models.loader_gguf import GgufSource
from replica.runner import ModelRunner
from replica.step import Draw, Row, Step
from tests.kernels.plain_decoder import library_or_reason
from tests.replica.model_driver import Driver, Running, greedy
from tests.replica.tiny_gguf import write_llama_gguf
from tests.replica.tiny_llama import SIZES, write_tiny_llama

ISA, REASON = library_or_reason()
needs_step = pytest.mark.skipif(ISA is None, reason=f"no C++ step here: {REASON}")
FITTING: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = [(7 * i * i + 3 * i) % 130 + 1 for i in range(90)]


def runner_of(model: Path, **changes: Any) -> ModelRunner:
    config = {"dtype": "bfloat16", "num_gpu_blocks_override": 128, "num_threads": 1, **changes}
    return ModelRunner(EngineConfig(model=str(model), **config))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("fitting"), **FITTING)


def logits_of(runner: ModelRunner) -> torch.Tensor:
    return runner.forward(Step(0, (Row(0, TOKENS, 0, [5, 9, 2, 40, 41, 3], Draw(greedy(), 0, TOKENS, ())),)))[0].double()


@needs_step
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}], ids=str)
def test_as_torch_in_float32(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = write_tiny_llama(tmp_path, **FITTING, **changes)
    meant, found = logits_of(runner_of(model, dtype="float32")), logits_of(runner_of(model))
    assert float((found - meant).norm() / meant.norm()) < 4e-2, "weights that are rounded to bfloat16 cost half of it"


@needs_step
@pytest.mark.parametrize("quantization", [None, "w8a8", "w4a8"])
def test_the_same_tokens_and_log_probabilities_in_every_setting(checkpoint: Path, quantization: str | None) -> None:
    """Alone, in company, in chunks, computed again after it lost its pages: the same bits, sampled or not."""
    runner = runner_of(checkpoint, quantization=quantization)
    wanted = [greedy(12, logprobs=3), greedy(12, temperature=1.2, seed=4, top_p=0.9, logprobs=3), greedy(12, repetition_penalty=1.3)]
    prompts = [TOKENS[:37], TOKENS[11:29], TOKENS[3:70]]
    alone = [Driver(runner).add(prompt, each) for prompt, each in zip(prompts, wanted, strict=True)]
    for each in alone:
        Driver(runner).run([each])
    driver = Driver(runner, shuffle=3)
    together = [driver.add(prompt, each) for prompt, each in zip(prompts, wanted, strict=True)]
    for _ in range(4):
        driver.step(together[:1], chunk=16)
    driver.run(together, chunk=7)
    again = driver.add(prompts[1], wanted[1])
    while len(again.output) < 5:
        driver.step([again])
    again.computed, again.blocks = 0, driver.add([0] * 29, greedy(1)).blocks
    driver.run([again], chunk=16)
    assert [what(each) for each in together] == [what(each) for each in alone]
    assert what(again)[0] == what(alone[1])[0] and what(again)[1][-6:] == what(alone[1])[1][-6:]


def what(running: Running) -> tuple[list[int], list[object]]:
    return running.output, [None if each is None else (each.logprob, each.top) for each in running.logprobs]


@needs_step
def test_prompt_scores_and_broken_rows(checkpoint: Path) -> None:
    runner = runner_of(checkpoint)
    scored = runner.execute(Step(1, (Row(0, TOKENS[:20], 0, [1, 2], None, score_from=0),))).outcomes[0].scores
    assert scored[0] is None and all(score is not None and score.logprob <= 0 for score in scored[1:]) and len(scored) == 20
    runner._pool[:, 7] = float("nan")
    rows = tuple(Row(page, [11], start, [page], Draw(greedy(), 0, [11] * (start + 1), ())) for page, start in ((7, 5), (8, 0)))
    broken, sound = runner.execute(Step(2, rows)).outcomes
    assert "not finite" in broken.error and sound.token is not None and bool(runner._pool[:, 7].isfinite().all())


@needs_step
def test_a_cache_in_int8(checkpoint: Path) -> None:
    """Nearly twice the tokens, and what a broken row leaves of its own is taken from its pages alone."""
    plain, runner = (
        runner_of(checkpoint, num_gpu_blocks_override=None, kv_cache_dtype=each, kv_cache_memory_bytes=1 << 22) for each in ("auto", "int8")
    )
    assert runner.kernels.endswith(", KV in int8") and runner.kv_block_bytes == 3 * 2 * 2 * 16 * (32 + 2)
    assert runner.limits.num_blocks * 34 // 64 == plain.limits.num_blocks
    assert float((logits_of(runner) - logits_of(plain)).norm() / logits_of(plain).norm()) < 5e-2
    before = runner._pool[:, 5].clone()
    runner._pool[:, 7] = -1
    rows = tuple(
        Row(at, [11], start, list(pages), Draw(greedy(), 0, [11] * (start + 1), ())) for at, start, pages in ((0, 21, (5, 7)), (1, 0, (8,)))
    )
    broken, sound = runner.execute(Step(2, rows)).outcomes
    assert "not finite" in broken.error and sound.token is not None and torch.equal(runner._pool[:, 5], before)
    again = Row(0, [11], 5, [7], Draw(greedy(), 0, [11] * 6, ()))
    assert runner.execute(Step(3, (again,))).outcomes[0].token is not None


@needs_step
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_of_a_gguf_keep_their_values(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    write_llama_gguf(path, gguf.GGMLQuantizationType[kind], **FITTING)
    files = resolve(str(path))
    source = GgufSource(files, read_model_config(files))
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        groups = source.groups(name)
        assert groups is not None
        assert torch.equal(dequantise(groups).bfloat16(), source.read(name))
    quantised = logits_of(runner_of(path, quantization="w8a8" if kind == "Q8_0" else "w4a8"))
    meant = logits_of(runner_of(path, dtype="float32"))
    assert float((quantised - meant).norm() / meant.norm()) < 8e-2  # 8-bit activations in a model of wild weights


def test_q4_k_keeps_its_values_but_for_the_rounding_of_scales() -> None:
    """Random blocks, against the gguf package's reading of them."""
    draw = np.random.default_rng(0)
    raw = draw.integers(0, 256, (6, 3, 144), dtype=np.uint8)
    raw[:, :, :4] = draw.uniform(1e-4, 1e-2, (6, 3, 2)).astype(np.float16).view(np.uint8)
    groups = groups_of(raw, "Q4_K")
    assert groups is not None and groups.m is not None and groups.q.max() == 15
    meant = torch.from_numpy(dequantize(raw.reshape(6, -1), gguf.GGMLQuantizationType.Q4_K))
    size = groups.d.float().unsqueeze(-1) * 15 + groups.m.float().abs().unsqueeze(-1)
    assert bool(((dequantise(groups) - meant).abs() <= size.expand(-1, -1, 32).flatten(-2) / 2048).all())
    raw[0, 0, :2] = np.array([65504], np.float16).view(np.uint8)
    assert groups_of(raw, "Q4_K") is None, "scales beyond float16: dequantised instead"
    assert groups_of(raw, "Q6_K") is None


def test_what_becomes_of_a_file_is_said() -> None:
    kinds = {"token_embd.weight": "Q6_K", "blk.0.attn_q.weight": "Q4_K", "blk.0.attn_v.weight": "Q6_K", "blk.0.attn_norm.weight": "F32"}
    assert held_as(kinds, None) == "Q4_K Q6_K dequantised"
    assert held_as(kinds, "w4a8") == "Q6_K quantised anew, Q4_K scales to the nearest"
    assert held_as(kinds, "w8a8") == "Q4_K Q6_K quantised anew"
    assert held_as({"token_embd.weight": "Q8_0", "blk.0.attn_q.weight": "Q4_1"}, "w4a8") == "Q4_1 Q8_0 as in the file"
    assert held_as({"output.weight": "Q8_0", "blk.0.attn_q.weight": "Q8_0"}, "w4a8") == "Q8_0 as in the file, Q8_0 quantised anew"
    assert held_as({"output.weight": "F16"}, "w8a8") == ""


@needs_step
@pytest.mark.parametrize(("quantization", "kind", "other"), [("w4a8", "Q4_0", "Q8_0"), ("w4a8", "Q4_1", "F16"), ("w8a8", "Q8_0", "Q4_1")])
def test_blocks_of_another_width_are_converted_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str, kind: str, other: str
) -> None:
    """Values and down are of another width, as in the usual mixed files: queries and keys beside them stay as they are."""
    kinds = gguf.GGMLQuantizationType
    path = tmp_path / "model.gguf"
    write_llama_gguf(path, kinds[kind], odd={".v_proj": kinds[other], ".down_proj": kinds[other], "embed_tokens": kinds["Q8_0"]}, **FITTING)
    converted = []

    def counted(weight: torch.Tensor) -> Groups:
        converted.append(tuple(weight.shape))
        return (quantise_q4 if quantization == "w4a8" else quantise_q8)(weight)

    monkeypatch.setattr(f"replica.models.loader_cpu.quantise_q{quantization[1]}", counted)
    quantised = logits_of(runner_of(path, quantization=quantization))
    assert converted == [(64, 64), (64, 96)] * SIZES["num_hidden_layers"], "values, then down"
    meant = logits_of(runner_of(path, dtype="float32"))
    assert float((quantised - meant).norm() / meant.norm()) < 0.35, "the rows are in their places"


def test_who_serves_and_why(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = write_tiny_llama(tmp_path / "odd")
    assert "torch: the hidden size 48 is not a multiple of 32 (the C++" in runner_of(odd).kernels
    assert "torch: the dtype is float32, not bfloat16" in runner_of(checkpoint, dtype="float32").kernels
    assert "torch: the block size 8 is not a multiple of 16" in runner_of(checkpoint, block_size=8).kernels
    with pytest.raises(ModelError, match="--quantization w4a8 needs the C"):
        runner_of(checkpoint, dtype="float32", quantization="w4a8")
    with pytest.raises(ModelError, match=r"--kv-cache-dtype int8 needs the C.*float32, not bfloat16"):
        runner_of(checkpoint, dtype="float32", kv_cache_dtype="int8")
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    without = runner_of(checkpoint)
    assert "torch: no g++ on PATH" in without.kernels or "torch: this CPU has neither" in without.kernels
    assert Driver(without).generate([3, 4, 5], greedy(4)), "and serves"
    monkeypatch.setenv("RANTANG_KERNELS", "cpu")
    with pytest.raises(ModelError, match="RANTANG_KERNELS=cpu needs the C"):
        runner_of(checkpoint)
    monkeypatch.setenv("RANTANG_KERNELS", "reference")
    assert "torch: RANTANG_KERNELS=reference" in runner_of(checkpoint).kernels


@needs_step
def test_the_dtype_auto_is_what_serves_best(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU without bfloat16 of its own, as all with AVX2 alone: there torch is slower in it, the C++ step is not."""
    monkeypatch.setattr("replica.step_choice.computes_bfloat16", lambda device: False)
    for quantization in (None, "w4a8"):
        runner = runner_of(checkpoint, dtype="auto", quantization=quantization)
        assert runner.kernels.startswith("C++ step, ") and runner.dtype is torch.bfloat16
    odd = write_tiny_llama(tmp_path / "odd")
    assert runner_of(odd, dtype="auto").dtype is torch.float32, "torch serves"
    assert runner_of(odd).dtype is torch.bfloat16, "as told"
    with pytest.raises(ModelError, match=r"--quantization w4a8 needs the C.*hidden size 48"):
        runner_of(odd, dtype="auto", quantization="w4a8")
    monkeypatch.setattr("replica.step_choice.computes_bfloat16", lambda device: True)
    assert runner_of(odd, dtype="auto").dtype is torch.bfloat16


@needs_step
def test_no_home_for_the_library(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(build.Path, "home", homeless)
    assert "torch: there is no home directory" in runner_of(checkpoint).kernels


@needs_step
def test_too_few_threads_are_a_fault_in_one_line(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(*_: object) -> None:
        raise MemoryError("no memory or no threads for the C++ step")

    monkeypatch.setattr("replica.held_model.load_decoder", starved)
    with pytest.raises(ModelError, match="no threads for the C"):
        runner_of(checkpoint)


@needs_step
def test_the_step_serves_where_it_can(checkpoint: Path) -> None:
    assert runner_of(checkpoint).kernels.startswith("C++ step, ")
    assert runner_of(checkpoint, quantization="w8a8").kernels.endswith(", w8a8")
