"""A model's configuration from a checkpoint's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replica.contract.architectures import Architecture, architecture_named
from replica.contract.model_error import ModelError
from replica.models.model_config import CONTEXT_DEFAULT, Mixture, ModelConfig
from replica.models.rope_scaling import scaling_of_json


def config_of_json(path: Path) -> ModelConfig:
    """Raises ModelError, naming the file and the key, for anything missing or not supported."""
    fields = _read_json(path)
    names = fields.get("architectures")
    architecture = next((row for name in names if (row := architecture_named(name))), None) if isinstance(names, list) else None
    if architecture is None:
        raise ModelError(f"{path}: unsupported architecture {names!r}")
    if fields.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act {fields['hidden_act']!r} is not supported (silu is)")
    if fields.get("quantization_config"):
        raise ModelError(f"{path}: quantized checkpoints (quantization_config) are not supported; GGUF files are")
    hidden, heads = _integer(fields, "hidden_size", path), _integer(fields, "num_attention_heads", path)
    context = _integer(fields, "max_position_embeddings", path, CONTEXT_DEFAULT)
    layers = _integer(fields, "num_hidden_layers", path)
    bias = bool(fields.get("attention_bias", False))
    rope = fields.get("rope_parameters")  # newer checkpoints keep theta and scaling together
    scaling = scaling_of_json(fields, context, path)
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=_integer(fields, "vocab_size", path),
        hidden_size=hidden,
        intermediate_size=_integer(fields, "moe_intermediate_size" if architecture.experts else "intermediate_size", path),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_integer(fields, "num_key_value_heads", path, heads),
        head_dim=_integer(fields, "head_dim", path, architecture.head_dim_default or hidden // heads),
        norm_epsilon=_number(fields, "rms_norm_eps", path, 1e-6),
        rope_theta=_number({**fields, **(rope if isinstance(rope, dict) else {})}, "rope_theta", path, 10_000.0),
        trained_context=context,
        eos_token_ids=_end_tokens(fields, path.parent),
        rope_scaling=scaling,
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=bias if architecture.qkv_bias is None else architecture.qkv_bias,
        output_bias=bias if architecture.output_bias is None else architecture.output_bias,
        mlp_bias=bool(fields.get("mlp_bias", False)) if architecture.mlp_bias is None else architecture.mlp_bias,
        head_norms=architecture.head_norms,
        mixture=_mixture(fields, path) if architecture.experts else None,
        windows=_windows(architecture, fields, layers, path),
    )


def _windows(architecture: Architecture, fields: Mapping[str, Any], layers: int, path: Path) -> tuple[int | None, ...]:
    """How far each layer looks back. With `some layers`, those that layer_types names, else those from max_window_layers on."""
    some = architecture.windowed == "some layers"
    if architecture.windowed == "no" or (some and not fields.get("use_sliding_window", False)):
        return ()
    if fields.get("sliding_window", architecture.window_default) is None:
        return ()
    window = _integer(fields, "sliding_window", path, architecture.window_default)
    if not some:
        return (window,) * layers
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.get("max_window_layers", 0)
        if not isinstance(first, int):
            raise ModelError(f"{path}: max_window_layers is {first!r}, an integer is expected")
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise ModelError(f"{path}: layer_types are not {layers} of sliding_attention and full_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _mixture(fields: Mapping[str, Any], path: Path) -> Mixture:
    """Layers without experts among the others, and windows, are refused."""
    for key, plain in (("mlp_only_layers", []), ("decoder_sparse_step", 1), ("use_sliding_window", False)):
        if fields.get(key, plain) not in (plain, None):
            raise ModelError(f"{path}: {key} {fields[key]!r} is not supported with experts ({plain!r} is)")
    count = _integer(fields, "num_experts" if "num_experts" in fields else "num_local_experts", path)
    per_token = _integer(fields, "num_experts_per_tok", path)
    if per_token > count:
        raise ModelError(f"{path}: num_experts_per_tok is {per_token}, of {count} experts")
    return Mixture(count, per_token, bool(fields.get("norm_topk_prob", False)))


def _end_tokens(fields: Mapping[str, Any], directory: Path) -> frozenset[int]:
    """End tokens: those of generation_config.json (chat models add theirs there), else of config.json."""
    generation = directory / "generation_config.json"
    value = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    if value is None:
        value = fields.get("eos_token_id")
    many = value if isinstance(value, list) else [value]
    return frozenset(one for one in many if isinstance(one, int))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not JSON") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{path}: not a JSON object")
    return fields


def _integer(fields: Mapping[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = fields.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{path}: {key} is {value!r}, a positive integer is expected")
    return value


def _number(fields: Mapping[str, Any], key: str, path: Path, default: float) -> float:
    value = fields.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"{path}: {key} is {value!r}, a positive number is expected")
    return float(value)
