"""How many KV pages there are, and how long a sequence they can hold."""

from __future__ import annotations

from dataclasses import dataclass

from replica.config import EngineConfig
from replica.contract.model_error import ModelError
from replica.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class PoolSize:
    num_blocks: int
    block_bytes: int  # of one block in all layers, all KV heads
    max_model_len: int  # tokens: what a sequence may reach


def block_bytes(config: EngineConfig, model: ModelConfig, element_bytes: int, scale_bytes: int = 0) -> int:
    """Bytes of one block over all layers and all ranks; ranks that share a KV head hold it each. scale_bytes: of each key and value."""
    heads = max(model.num_kv_heads, config.tensor_parallel_size)
    return model.num_layers * 2 * heads * config.block_size * (model.head_dim * element_bytes + scale_bytes)


def size_pool(config: EngineConfig, model: ModelConfig, element_bytes: int, scale_bytes: int = 0) -> PoolSize:
    """The pool that the configuration pays for, and the effective context.

    An explicit max_model_len that the model or the pool cannot hold is refused with both numbers; one not given is the
    model's, lowered to what the pool holds. Raises ModelError.
    """
    each = block_bytes(config, model, element_bytes, scale_bytes)
    blocks = config.kv_cache_memory_bytes // each
    if config.num_gpu_blocks_override is not None:
        blocks = config.num_gpu_blocks_override
    pool_tokens = blocks * config.block_size
    if pool_tokens < 2:
        if config.num_gpu_blocks_override is not None:
            raise ModelError(f"a pool of {blocks} KV blocks of {config.block_size} tokens holds no sequence: the shortest takes 2 tokens")
        raise ModelError(f"kv_cache_memory_bytes {config.kv_cache_memory_bytes} holds no KV block: one takes {each} bytes")
    wanted = config.max_model_len
    if wanted is None:
        return PoolSize(blocks, each, min(model.max_model_len, pool_tokens))
    if wanted > model.context_max:
        raise ModelError(f"max_model_len {wanted} exceeds the model's context of {model.context_max} tokens")
    if wanted > pool_tokens:
        needed = -(-wanted // config.block_size) * each
        raise ModelError(
            f"max_model_len {wanted} does not fit the KV pool of {pool_tokens} tokens ({blocks} blocks of {config.block_size}); "
            f"it takes {needed} bytes (kv_cache_memory_bytes) or max_model_len ≤ {pool_tokens}"
        )
    return PoolSize(blocks, each, wanted)
