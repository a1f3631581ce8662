"""A model's configuration from a GGUF's metadata. Its keys begin with the architecture's name there."""

from __future__ import annotations

from pathlib import Path

from replica.contract.architectures import architecture_of_gguf
from replica.contract.gguf_header import GgufHeader
from replica.contract.model_error import ModelError
from replica.models.model_config import CONTEXT_DEFAULT, ModelConfig
from replica.models.rope_scaling import scaling_of_gguf


def config_of_gguf(header: GgufHeader, path: Path) -> ModelConfig:
    """Raises ModelError, naming the file and the key, for anything missing or not supported."""
    stem = header.text("general.architecture", "none")
    architecture = architecture_of_gguf(stem)
    if architecture is None:
        raise ModelError(f"{path}: unsupported architecture {stem!r}")

    def number(key: str, default: float | None = None) -> float:
        value = header.number(f"{stem}.{key}")
        value = default if value is None else value
        if value is None or value <= 0:
            raise ModelError(f"{path}: metadata {stem}.{key} is {value!r}, a positive number is expected")
        return value

    names = {tensor.name for tensor in header.tensors}
    heads, hidden, layers = int(number("attention.head_count")), int(number("embedding_length")), int(number("block_count"))
    head_dim = int(number("attention.key_length", hidden // heads))
    for key in ("rope.dimension_count", "attention.value_length"):
        if int(number(key, head_dim)) != head_dim:
            raise ModelError(f"{path}: metadata {stem}.{key} differs from the head's {head_dim} dimensions, which is not supported")
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    ends = [header.integer(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    context = int(number("context_length", CONTEXT_DEFAULT))
    window = header.integer(f"{stem}.attention.sliding_window")
    qkv_bias = "blk.0.attn_q.bias" in names if architecture.qkv_bias is None else architecture.qkv_bias
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=int(number("vocab_size", len(tokens) if isinstance(tokens, list) else None)),
        hidden_size=hidden,
        intermediate_size=int(number("feed_forward_length")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(number("attention.head_count_kv", heads)),
        head_dim=head_dim,
        norm_epsilon=number("attention.layer_norm_rms_epsilon", 1e-5),
        rope_theta=number("rope.freq_base", 10_000.0),
        trained_context=context,
        eos_token_ids=frozenset(end for end in ends if end is not None),
        rope_scaling=scaling_of_gguf(header, stem, context, path),
        tied_embeddings="output.weight" not in names,
        qkv_bias=qkv_bias,
        output_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_up.bias" in names,
        head_norms=architecture.head_norms,
        windows=(window,) * layers if window else (),
    )
