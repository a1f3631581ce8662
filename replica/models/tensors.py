"""Which tensors a model consists of, and whether a checkpoint has them: known from the files' headers, before anything is read."""

from __future__ import annotations

import re
from collections.abc import Mapping

from replica.contract.gguf_header import read_gguf_header
from replica.contract.model_error import ModelError
from replica.contract.model_files import ModelFiles
from replica.contract.safetensors_header import read_safetensors_header
from replica.models.gguf_names import gguf_name
from replica.models.model_config import ModelConfig

Shape = tuple[int, ...]
EMBEDDING, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
_OF_A_LAYER = re.compile(r"(model\.layers|blk)\.\d+\..+")
_RECOMPUTED = re.compile(r".+(rotary_emb\.inv_freq|\.attn_rot_embd\.weight|\.rope_freqs\.weight)")  # tables some files carry along


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that the model reads, under its name in a Hugging Face checkpoint; matrices are [out, in]."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {f"{EMBEDDING}.weight": (vocab, hidden), f"{NORM}.weight": (hidden,)}
    if not config.tied_embeddings:
        shapes[f"{HEAD}.weight"] = (vocab, hidden)
    inside = _layer_shapes(config)
    for layer in range(config.num_layers):
        shapes.update((f"model.layers.{layer}.{name}", shape) for name, shape in inside.items())
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, dim = config.hidden_size, config.head_dim
    query, kv = config.num_heads * dim, config.num_kv_heads * dim
    linear = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.output_bias),
        **_feed_forward_shapes(config),
    }
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for name, (rows, columns, has_bias) in linear.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.head_norms:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (dim,)
    return shapes


def _feed_forward_shapes(config: ModelConfig) -> dict[str, tuple[int, int, bool]]:
    hidden, width = config.hidden_size, config.intermediate_size
    one = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    if config.mixture is None:
        return {f"mlp.{name}": (*shape, config.mlp_bias) for name, shape in one.items()}
    experts = {f"{expert_stem(expert)}.{name}": (*shape, False) for expert in range(config.mixture.count) for name, shape in one.items()}
    return {"mlp.gate": (config.mixture.count, hidden, False), **experts}


def expert_stem(expert: int) -> str:
    return f"mlp.experts.{expert}"


def check_tensors(files: ModelFiles, config: ModelConfig) -> None:
    """Every tensor is there in its shape, and no layer has one that would not be used. Raises ModelError, naming the tensor."""
    found = _shapes_in(files)
    expected = {gguf_name(name) if files.kind == "gguf" else name: shape for name, shape in tensor_shapes(config).items()}
    where = files.gguf if files.kind == "gguf" else files.directory
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{where}: tensor {name} is missing ({config.architecture} has one)")
        if found[name] != shape:
            raise ModelError(f"{where}: tensor {name} has the shape {list(found[name])}; the configuration says {list(shape)}")
    for name in found:
        if name not in expected and _OF_A_LAYER.fullmatch(name) and not _RECOMPUTED.fullmatch(name):
            raise ModelError(
                f"{where}: tensor {name} has no place in {config.architecture} as configured (left out, it would change the answers)"
            )


def _shapes_in(files: ModelFiles) -> Mapping[str, Shape]:
    if files.kind == "gguf":
        return {tensor.name: tuple(reversed(tensor.shape)) for tensor in read_gguf_header(files.gguf).tensors}
    return {name: shape for path in files.weights for name, shape in read_safetensors_header(path).shapes.items()}
