"""Random Llama checkpoints small enough to make in a test, and transformers' own idea of what they compute."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 132,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}


def write_tiny_llama(directory: Path, *, shards: int = 1, seed: int = 0, **changes: Any) -> Path:
    """A whole checkpoint directory (without a tokenizer)."""
    config = {**SIZES, **changes}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = list(tensors := random_tensors(config, seed))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    homes = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(homes.values())):
        save_file({name: tensors[name] for name in names if homes[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return directory


def reference_logits(directory: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """transformers' logits [T, V] of one sequence, float32."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, width, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (2.0 / columns**0.5)

    def vector(size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator) + 0.5

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden), "model.norm.weight": vector(hidden)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        stem = f"model.layers.{index}"
        tensors[f"{stem}.input_layernorm.weight"] = vector(hidden)
        tensors[f"{stem}.post_attention_layernorm.weight"] = vector(hidden)
        shapes = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
        }
        for name, shape in shapes.items():
            tensors[f"{stem}.{name}.weight"] = matrix(*shape)
            biased = config.get("attention_bias") if name.startswith("self_attn") else config.get("mlp_bias")
            if biased:
                tensors[f"{stem}.{name}.bias"] = vector(shape[0])
    return tensors
