"""What a model is made of, read from a checkpoint's config.json or a GGUF's metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from replica.contract.gguf_header import GgufHeader, read_gguf_header
from replica.contract.model_error import ModelError
from replica.contract.model_files import ModelFiles

CONTEXT_DEFAULT = 2048  # tokens, where a configuration does not say


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How frequencies change for contexts longer than trained. linear: all ÷ factor. llama3: by wavelength against the original context."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192  # tokens


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family. Sizes are those of the whole model, not of a rank's part."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope_theta: float
    max_model_len: int  # tokens
    eos_token_ids: frozenset[int]
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False  # the head is the embedding
    attention_bias: bool = False  # of queries, keys and values
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False


def read_model_config(files: ModelFiles) -> ModelConfig:
    """Raises ModelError, naming the file and the key, for anything missing or not supported."""
    if files.kind == "gguf":
        where = files.gguf
        config = _from_gguf(read_gguf_header(where), where)
    else:
        where = files.directory / "config.json"
        config = _from_json(where)
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{where}: {config.num_kv_heads} KV heads do not divide {config.num_heads} heads")
    if config.head_dim % 2:
        raise ModelError(f"{where}: head_dim {config.head_dim} is odd")
    return config


def shard_problem(config: ModelConfig, tp_size: int) -> str:
    """Why this model cannot be split over `tp_size` ranks, with the sizes that work; '' when it can."""
    sizes = {
        "attention heads": config.num_heads,
        "KV heads": config.num_kv_heads,
        "feed-forward width": config.intermediate_size,
        "vocabulary": config.vocab_size,
    }
    wrong = [f"{name} ({value})" for name, value in sizes.items() if value % tp_size]
    if not wrong:
        return ""
    fitting = [str(n) for n in range(1, config.num_kv_heads + 1) if not any(value % n for value in sizes.values())]
    return f"tensor_parallel_size {tp_size} does not divide {', '.join(wrong)}; sizes that work: {', '.join(fitting)}"


def _from_json(path: Path) -> ModelConfig:
    fields = _read_json(path)
    rope = fields.get("rope_parameters") or {}  # newer checkpoints keep theta and scaling together
    hidden, heads = _integer(fields, "hidden_size", path), _integer(fields, "num_attention_heads", path)
    if fields.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act {fields['hidden_act']!r} is not supported (silu is)")
    bias = bool(fields.get("attention_bias", False))
    return ModelConfig(
        vocab_size=_integer(fields, "vocab_size", path),
        hidden_size=hidden,
        intermediate_size=_integer(fields, "intermediate_size", path),
        num_layers=_integer(fields, "num_hidden_layers", path),
        num_heads=heads,
        num_kv_heads=_integer(fields, "num_key_value_heads", path, heads),
        head_dim=_integer(fields, "head_dim", path, hidden // heads),
        norm_epsilon=_number(fields, "rms_norm_eps", path, 1e-6),
        rope_theta=_number({**fields, **rope}, "rope_theta", path, 10_000.0),
        max_model_len=_integer(fields, "max_position_embeddings", path, CONTEXT_DEFAULT),
        eos_token_ids=_end_tokens(fields, path.parent),
        rope_scaling=_scaling(rope if rope.get("rope_type") else fields.get("rope_scaling"), path),
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bool(fields.get("mlp_bias", False)),
    )


def _from_gguf(header: GgufHeader, path: Path) -> ModelConfig:
    def number(key: str, default: float | None = None) -> float:
        value = header.number(f"llama.{key}")
        value = default if value is None else value
        if value is None or value <= 0:
            raise ModelError(f"{path}: metadata llama.{key} is {value!r}, a positive number is expected")
        return value

    names = {tensor.name for tensor in header.tensors}
    heads, hidden = int(number("attention.head_count")), int(number("embedding_length"))
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    ends = [header.integer(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return ModelConfig(
        vocab_size=int(number("vocab_size", len(tokens) if isinstance(tokens, list) else None)),
        hidden_size=hidden,
        intermediate_size=int(number("feed_forward_length")),
        num_layers=int(number("block_count")),
        num_heads=heads,
        num_kv_heads=int(number("attention.head_count_kv", heads)),
        head_dim=int(number("attention.key_length", hidden // heads)),
        norm_epsilon=number("attention.layer_norm_rms_epsilon", 1e-5),
        rope_theta=number("rope.freq_base", 10_000.0),
        max_model_len=int(number("context_length", CONTEXT_DEFAULT)),
        eos_token_ids=frozenset(end for end in ends if end is not None),
        rope_scaling=_gguf_scaling(header, path),
        tied_embeddings="output.weight" not in names,
        attention_bias="blk.0.attn_q.bias" in names,
        output_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_up.bias" in names,
    )


def _gguf_scaling(header: GgufHeader, path: Path) -> RopeScaling | None:
    kind = header.text("llama.rope.scaling.type", "none")
    if kind == "linear":
        return RopeScaling("linear", factor=header.number("llama.rope.scaling.factor") or 1.0)
    if kind != "none":
        raise ModelError(f"{path}: rope scaling {kind!r} is not supported")
    return None


def _scaling(fields: Any, path: Path) -> RopeScaling | None:
    if not fields:
        return None
    kind = fields.get("rope_type", fields.get("type", "default"))
    try:
        if kind == "default":
            return None
        if kind == "linear":
            return RopeScaling("linear", factor=float(fields["factor"]))
        if kind == "llama3":
            return RopeScaling(
                "llama3",
                factor=float(fields["factor"]),
                low_freq_factor=float(fields["low_freq_factor"]),
                high_freq_factor=float(fields["high_freq_factor"]),
                original_context=int(fields["original_max_position_embeddings"]),
            )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: rope scaling {kind!r}: {error!r}") from error
    raise ModelError(f"{path}: rope scaling {kind!r} is not supported (linear and llama3 are)")


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
