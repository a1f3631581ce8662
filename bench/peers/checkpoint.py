"""The served GGUF as the peers want it: a bfloat16 checkpoint of Hugging Face's shape, and a bfloat16 GGUF.

All hold the very weights that we serve: dequantised, rounded to bfloat16 once.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from replica.contract.gguf_header import GgufHeader, read_gguf_header
from replica.contract.model_error import ModelError
from replica.contract.model_files import ModelFiles
from replica.models.config import read_model_config
from replica.models.gguf_names import INSIDE
from replica.models.loader_gguf import GgufSource
from replica.models.model_config import ModelConfig
from router.text.gguf_encoder import encoder_from_gguf

ARCHITECTURE = "LlamaForCausalLM"
FILE_TYPE_BF16 = 32  # ggml's LLAMA_FTYPE_MOSTLY_BF16


def make_checkpoint(files: ModelFiles, folder: Path) -> None:
    """config.json, model.safetensors and the tokenizer in `folder`. Raises ModelError for a model that is not written."""
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(files, folder)
    write_tokenizer(files, folder)


def write_weights(files: ModelFiles, folder: Path) -> None:
    config, header = read_model_config(files), read_gguf_header(files.gguf)
    if config.architecture != ARCHITECTURE or config.rope_scaling is not None or config.qkv_bias != config.output_bias:
        raise ModelError(f"{files.gguf}: only a plain Llama is made a checkpoint (this is {config.architecture})")
    source = GgufSource(files, config)
    tensors = {name: source.read(name).bfloat16().contiguous() for name in tensor_names(config) if source.has(name)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    del tensors
    source.close()
    _write_json(folder / "config.json", config_fields(config, header))
    _write_json(folder / "generation_config.json", {"eos_token_id": sorted(config.eos_token_ids), "do_sample": False})


def write_tokenizer(files: ModelFiles, folder: Path) -> None:
    """As our router reads it from the GGUF: transformers' own conversion loses the step that splits digits."""
    header = read_gguf_header(files.gguf)
    encoder_from_gguf(header.metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_fields(read_model_config(files), header))


def _write_json(path: Path, fields: dict[str, object]) -> None:
    path.write_text(json.dumps(fields, indent=1) + "\n")


def tensor_names(config: ModelConfig) -> list[str]:
    """Every name that a Llama checkpoint may have; biases and head only where the file has them."""
    top = ["model.embed_tokens.weight", "model.norm.weight"] + ([] if config.tied_embeddings else ["lm_head.weight"])
    layers = [f"model.layers.{i}.{inside}.{kind}" for i in range(config.num_layers) for inside in INSIDE for kind in ("weight", "bias")]
    return top + layers


def config_fields(config: ModelConfig, header: GgufHeader) -> dict[str, object]:
    """The rope base in both spellings: newer readers look for `rope_parameters`, and fall back to 10,000 without a word."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": round(config.norm_epsilon, 12),  # a float32 in the file
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_model_len,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": header.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": header.integer("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def tokenizer_fields(config: ModelConfig, header: GgufHeader) -> dict[str, object]:
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)

    def token(kind: str) -> object:
        index = header.integer(f"tokenizer.ggml.{kind}_token_id")
        return None if index is None else tokens[index]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_model_len,
        "chat_template": header.text("tokenizer.chat_template"),
    }


def make_gguf(source: Path, target: Path) -> None:
    """`source` with its quantised tensors in bfloat16; metadata and float32 vectors as they are."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        value = FILE_TYPE_BF16 if field.name == "general.file_type" else field.contents()
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type)
    bf16 = gguf.GGMLQuantizationType.BF16
    for tensor in reader.tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, tensor.data)
        else:
            writer.add_tensor(tensor.name, quantize(dequantize(tensor.data, tensor.tensor_type), bf16), raw_dtype=bf16)
    target.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
