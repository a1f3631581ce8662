"""A model on an accelerator: weights first, then the largest step is tried, and what memory is left becomes the KV pool."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.batch import CacheLayout, PagedBatch
from kernels.ops import Operators
from replica.config import EngineConfig
from replica.contract.model_error import ModelError
from replica.contract.model_files import ModelFiles
from replica.device import Device
from replica.graphed_forward import PAGES_MIN, GraphedForward, bucket_sizes, shapes_max
from replica.kv_pool import PoolSize, size_pool
from replica.memory_profile import GRAPHS_BYTES_EACH, Profile, pool_bytes
from replica.models.llama import Llama
from replica.models.loader import Placement, load_model
from replica.models.model_config import ModelConfig
from replica.models.weight_source import WeightSource
from replica.parallel.card import card
from replica.parallel.group import TensorParallel


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Where a model is to be held, and what computes it."""

    config: EngineConfig
    model: ModelConfig
    device: Device
    operators: Operators
    dtype: torch.dtype
    tp: TensorParallel

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(self.model.kv_heads_of_rank(self.tp.size), self.config.block_size, self.model.head_dim)

    @property
    def rank_block_bytes(self) -> int:
        """Of one block in all layers, on this rank."""
        layout = self.layout
        return self.model.num_layers * 2 * layout.kv_heads * layout.block_size * layout.head_dim * self.dtype.itemsize

    @property
    def pages_max(self) -> int:
        """Of the longest sequence."""
        return -(-(self.config.max_model_len or self.model.max_model_len) // self.config.block_size)

    def pages(self, count: int) -> torch.Tensor:
        """[layers, count, 2, kv_heads, block, D], zeros. Raises ModelError where they do not fit."""
        layout = self.layout
        shape = (self.model.num_layers, count, 2, layout.kv_heads, layout.block_size, layout.head_dim)
        try:
            return torch.zeros(shape, dtype=self.dtype, device=self.device.torch_device)
        except RuntimeError as error:  # torch's own out-of-memory error
            raise ModelError(f"{count} KV pages cannot be allocated: {str(error).splitlines()[0]}") from error


def hold_on_device(place: OnDevice, files: ModelFiles, source: WeightSource) -> tuple[GraphedForward, PoolSize]:
    """Load, measure, allocate, record graphs. All ranks together: they take the smallest pool of any. Raises ModelError.

    `source`: of the files' tensors; closed when they are read.
    """
    config = place.config
    place.tp.agree(
        card(
            weights=files.fingerprint,
            dtype=place.dtype,
            kernels=f"{place.operators.name} {config.quantization or ''}".rstrip(),
            num_blocks=config.num_gpu_blocks_override or 0,
            block_size=config.block_size,
            max_model_len=config.max_model_len or 0,
        )
    )
    positions = config.max_model_len or place.model.max_model_len
    try:
        product = place.operators.matmul_batch_invariant if config.batch_invariant else None
        placement = Placement(place.dtype, place.device.torch_device, place.tp, place.operators, positions, product, config.quantization)
        model = load_model(place.model, source, placement)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"the weights do not fit on {place.device.torch_device}: {str(error).splitlines()[0]}") from error
    finally:
        source.close()
    blocks = num_blocks(place, model)
    size = size_pool(config.model_copy(update={"num_gpu_blocks_override": blocks}), place.model, place.dtype.itemsize)
    forward = GraphedForward(
        model,
        place.operators,
        place.layout,
        place.device,
        place.pages(size.num_blocks + 1),
        tp=place.tp,
        rows_max=config.max_num_seqs,
        tokens_max=config.max_num_batched_tokens,
    )
    forward.warm()
    return forward, size


def num_blocks(place: OnDevice, model: Llama) -> int:
    """As configured in blocks or bytes, else what the device has left; the least of all ranks.

    Raises ModelError, on all of them, where one has room for none.
    """
    config = place.config
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    reason = ""
    if "kv_cache_memory_bytes" in config.model_fields_set:
        own = config.kv_cache_memory_bytes // place.tp.size // place.rank_block_bytes
    else:
        try:
            room = pool_bytes(measure(place, model), config.gpu_memory_utilization)
            own = room // place.rank_block_bytes - 1  # the page of rows that pad
        except ModelError as error:  # raised when the others know of it: they wait for this rank's number
            own, reason = 0, str(error)
    told = place.tp.all_gather_last_dim(torch.tensor([own], dtype=torch.int64, device=place.device.torch_device))
    least = int(told.min())
    if least * config.block_size < 2:
        what = f"rank {int(told.argmin())} has room for {max(0, least)} KV blocks of {place.rank_block_bytes} bytes"
        raise ModelError(reason or f"{what}: more ranks, or a larger gpu_memory_utilization or kv_cache_memory_bytes would make some")
    return least


@torch.inference_mode()
def measure(place: OnDevice, model: Llama) -> Profile:
    """What the largest step takes: a prompt of max_num_batched_tokens and the logits of max_num_seqs rows; and what graphs will."""
    device, config = place.device, place.config
    tokens = min(config.max_num_batched_tokens, config.max_model_len or place.model.max_model_len)
    pages = -(-tokens // config.block_size)
    rows = bucket_sizes(config.max_num_seqs)[-1]
    pool = place.pages(pages)
    device.release_cached()
    held = pool.numel() * pool.element_size()
    weights = device.held_bytes() - held
    before = device.memory()
    elsewhere = before.total_bytes - before.free_bytes - device.held_bytes()
    prompt = PagedBatch(np.zeros(1, np.int32), np.array([tokens], np.int32), np.arange(pages, dtype=np.int32)[None])
    activations = _peak(place, model, pool, prompt, config.max_num_seqs) - weights - held
    none = np.zeros(rows, np.int32)
    decodes = PagedBatch(none, none + 1, np.zeros((rows, PAGES_MIN), np.int32), recurring=True)
    recorded = _peak(place, model, pool, decodes, rows) - weights - held  # graphs keep memory of their own, of the largest's size
    outputs = 4 * rows * (place.model.hidden_size + place.model.vocab_size)
    graphs = GRAPHS_BYTES_EACH * shapes_max(config.max_num_seqs, place.pages_max) + outputs + max(0, recorded)
    return Profile(before.total_bytes, weights, max(0, activations), max(0, elsewhere), graphs)


def _peak(place: OnDevice, model: Llama, pool: torch.Tensor, batch: PagedBatch, drawing: int) -> int:
    """The most bytes that torch held during a step of `batch` and the logits of `drawing` rows."""
    device = place.device.torch_device
    place.device.reset_peak()
    plans = {
        window: place.operators.plan_attention(batch, place.layout, place.dtype, device, window)
        for window in dict.fromkeys(place.model.layer_windows)
    }
    positions = torch.from_numpy(batch.positions.astype(np.int64)).to(device)
    hidden = model.forward(torch.zeros_like(positions), positions, pool, plans)
    model.logits(hidden[:1].expand(drawing, -1))
    place.device.synchronize()
    return place.device.peak_bytes()
