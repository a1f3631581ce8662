"""Small GGUF files, written by the gguf package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.replica.tiny_llama import SIZES, random_tensors

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path) -> Path:
    """A header with a bit of everything and one tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b"])
    writer.add_bool("flag", True)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("token_embd.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    _write(writer)
    return path


def write_llama_gguf(
    path: Path, kind: gguf.GGMLQuantizationType, *, odd: Mapping[str, gguf.GGMLQuantizationType] | None = None, **changes: object
) -> dict[str, torch.Tensor]:
    """A whole random Llama; matrices quantised as `kind`, or as `odd` says for a part of the name, q and k rows permuted as GGUF has them.

    Returns what was meant.
    """
    config = {**SIZES, **changes}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(100000.0)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_eos_token_id(2)
    meant = random_tensors(config, 0)
    for name, tensor in meant.items():
        values = tensor.numpy()
        if ".q_proj." in name or ".k_proj." in name:
            half = config["head_dim"] // 2
            values = values.reshape(-1, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        wanted = next((each for part, each in (odd or {}).items() if part in name), kind)
        raw_kind = wanted if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, raw_kind), raw_dtype=raw_kind)
    _write(writer)
    return meant


def gguf_of_checkpoint(directory: Path, path: Path, kind: str) -> Path:
    """The same model as float32 GGUF of the architecture `kind`, whose query and key rows are not permuted."""
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_eos_token_id(2)
    for name, tensor in load_file(directory / "model.safetensors").items():
        writer.add_tensor(_gguf_name(name), tensor.numpy())
    _write(writer)
    return path


def _gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, *inside, kind = name.split(".")
    return f"blk.{layer}.{_NAMES['.'.join(inside)]}.{kind}"


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
