"""The checkpoint and the bfloat16 GGUF hold the weights that we serve, bit for bit, and the settings that readers miss."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch

from bench.peers.checkpoint import config_fields, make_gguf, tensor_names, tokenizer_fields
from bench.peers.home import Home
from replica.contract.gguf_header import read_gguf_header
from replica.contract.model_error import ModelError
from replica.contract.model_files import resolve
from replica.models.config import read_model_config
from replica.models.loader_gguf import GgufSource
from router.text.tokenizer_files import tokenizer_from_gguf, tokenizer_from_json
from tests.replica.tiny_gguf import write_llama_gguf


def test_the_bf16_gguf_holds_the_weights_we_serve(tmp_path: Path) -> None:
    source, target = tmp_path / "quantised.gguf", tmp_path / "bf16.gguf"
    write_llama_gguf(source, gguf.GGMLQuantizationType.Q8_0)
    make_gguf(source, target)
    before, after = resolve(str(source)), resolve(str(target))
    config = read_model_config(before)
    assert read_model_config(after) == config
    ours, theirs = GgufSource(before, config.head_dim), GgufSource(after, config.head_dim)
    names = [name for name in tensor_names(config) if ours.has(name)]
    assert len(names) == len(read_gguf_header(source).tensors)
    for name in names:
        assert torch.equal(ours.read(name).bfloat16(), theirs.read(name).bfloat16()), name
    kinds = {tensor.kind for tensor in read_gguf_header(target).tensors}
    assert kinds == {int(gguf.GGMLQuantizationType.BF16), int(gguf.GGMLQuantizationType.F32)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("peers"))
    try:
        assert home.gguf
    except ModelError as error:
        pytest.skip(str(error))
    home.make_models()
    return home


def test_the_checkpoint_says_what_the_gguf_says(made: Home) -> None:
    gguf_config = read_model_config(resolve("smollm2"))
    config = read_model_config(resolve(str(made.checkpoint)))
    assert config == gguf_config
    assert config.rope_theta == 100_000 and config.tied_embeddings
    fields = json.loads((made.checkpoint / "config.json").read_text())
    assert fields["rope_parameters"]["rope_theta"] == fields["rope_theta"] == 100_000
    assert "chat_template" in json.loads((made.checkpoint / "tokenizer_config.json").read_text())


def test_the_checkpoint_holds_the_weights_we_serve(made: Home) -> None:
    from safetensors import safe_open

    config = read_model_config(resolve("smollm2"))
    source = GgufSource(resolve("smollm2"), config.head_dim)
    with safe_open(made.checkpoint / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == {name for name in tensor_names(config) if source.has(name)}
        for name in ("model.embed_tokens.weight", "model.layers.7.self_attn.q_proj.weight", "model.layers.29.mlp.down_proj.weight"):
            assert torch.equal(file.get_tensor(name), source.read(name).bfloat16()), name


def test_the_tokenizer_splits_digits_and_adds_nothing(made: Home) -> None:
    ours = tokenizer_from_gguf(read_gguf_header(made.gguf).metadata)
    theirs = tokenizer_from_json(made.checkpoint / "tokenizer.json")
    for text in ("In 2026 it cost 1,234.50", "<|im_start|>user\nhi<|im_end|>", "naïve café, 東京", "   spaces\n\n"):
        assert theirs.encode(text, parse_special=True, add_special=True) == ours.encode(text, parse_special=True, add_special=True)
    assert len(theirs.encode("2026", parse_special=True)) == 4  # digit by digit


def test_made_models_are_kept(made: Home) -> None:
    times = [(made.checkpoint / "model.safetensors").stat().st_mtime_ns, made.gguf_bf16.stat().st_mtime_ns]
    made.make_models()
    assert times == [(made.checkpoint / "model.safetensors").stat().st_mtime_ns, made.gguf_bf16.stat().st_mtime_ns]
    assert not list(made.checkpoint.parent.glob("*.partial"))


def test_tokens_are_named_where_the_file_names_them() -> None:
    files = resolve("smollm2")
    header, config = read_gguf_header(files.gguf), read_model_config(files)
    assert tokenizer_fields(config, header)["eos_token"] == "<|im_end|>"
    assert config_fields(config, header)["eos_token_id"] == 2
