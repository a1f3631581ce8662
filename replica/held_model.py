"""A model in memory with its KV pool: all that start-up decides, and everything it can refuse."""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.batch import CacheLayout, ModelSizes
from kernels.cpu.pages import pool_shape
from kernels.cpu.sizes import SCALE_BYTES
from kernels.names import TRITON
from kernels.ops import KernelError, Operators, choose_device, choose_operators
from replica.config import EngineConfig
from replica.contract.model_error import ModelError
from replica.contract.model_files import ModelFiles, resolve
from replica.device import CudaDevice
from replica.forward import CpuForward, Forward, TorchForward
from replica.held_on_device import OnDevice, hold_on_device
from replica.kv_pool import PoolSize, size_pool
from replica.models.config import read_model_config
from replica.models.gguf_groups import held_as
from replica.models.loader import Placement, load_model, open_source, rotary_table
from replica.models.loader_cpu import CpuPlacement, load_decoder
from replica.models.model_config import ModelConfig, shard_problem
from replica.models.packed_cache import PackedCache, packed_cache
from replica.models.tensors import check_tensors
from replica.parallel.card import card
from replica.parallel.group import TensorParallel
from replica.step_choice import StepChoice, choose_step

OnStage = Callable[[str, float], None]  # (what has ended, seconds it took)


@dataclass(frozen=True, slots=True)
class HeldModel:
    files: ModelFiles
    config: ModelConfig
    forward: Forward
    kernels: str  # what computes, and why it: for people
    dtype: torch.dtype  # of weights, and of KV but for --kv-cache-dtype
    operators: Operators
    pool: Tensor  # [layers, pages, 2, kv_heads, block, D], this rank's part; in int8 a little wider
    size: PoolSize


class Stages:
    """Tells how long each stage of the start took."""

    def __init__(self, on_stage: OnStage | None) -> None:
        self._on_stage = on_stage
        self._since = time.perf_counter()

    def ended(self, name: str) -> None:
        now = time.perf_counter()
        if self._on_stage is not None:
            self._on_stage(name, now - self._since)
        self._since = now


def hold_model(config: EngineConfig, tp: TensorParallel, stages: Stages) -> HeldModel:
    """Find, check, load. Raises ModelError, one line for the user; nothing large is read before everything fits."""
    config = config.model_copy(update={"tensor_parallel_size": tp.size})
    files = resolve(config.model, config.revision)
    model_config = read_model_config(files)
    problem = shard_problem(model_config, tp.size)
    if problem:
        raise ModelError(f"{config.model}: {problem}")
    check_tensors(files, model_config)
    device = _device(config, tp.rank)
    operators, choice = _choose(config, model_config, device)
    dtype = choice.dtype
    source = open_source(files, model_config)
    held = held_as(source.kinds(), config.quantization)
    reason = "; ".join(filter(None, (choice.reason, f"weights {held}" if held else "")))
    if device.type == "cuda":
        place = OnDevice(config, model_config, CudaDevice(device), operators, dtype, tp)
        graphed, size = hold_on_device(place, files, source)
        stages.ended("weights, KV pool, graphs")
        return HeldModel(files, model_config, graphed, reason, dtype, operators, graphed.pool, size)
    kept_dtype = torch.int8 if config.kv_cache_dtype == "int8" else dtype
    size = size_pool(config, model_config, kept_dtype.itemsize, SCALE_BYTES if kept_dtype is torch.int8 else 0)
    tp.agree(
        card(
            weights=files.fingerprint,
            dtype=dtype,
            kernels=f"{operators.name} {config.quantization or ''}".rstrip(),
            num_blocks=size.num_blocks,
            block_size=config.block_size,
            max_model_len=size.max_model_len,
        )
    )
    layout = CacheLayout(model_config.kv_heads_of_rank(tp.size), config.block_size, model_config.head_dim)
    stages.ended("model files")
    pool = _empty_pool(pool_shape(model_config.num_layers, size.num_blocks, layout, kept_dtype), kept_dtype, device)
    stages.ended("KV pool")
    forward: Forward
    kept = ""
    cache: PackedCache | None = None
    try:
        if choice.library is not None:
            rope = rotary_table(model_config, source, size.max_model_len, device)
            threads = config.num_threads or len(os.sched_getaffinity(0))
            cache = packed_cache(files, config.quantization)
            placement = CpuPlacement(choice.library, layout, pool, rope, threads, config.quantization, cache)
            forward = CpuForward(load_decoder(model_config, source, placement))
            kept = cache.keep() if cache is not None else ""
        else:
            product = operators.matmul_batch_invariant if config.batch_invariant else None
            placed = Placement(dtype, device, tp, operators, size.max_model_len, product, config.quantization)
            model = load_model(model_config, source, placed)
            forward = TorchForward(model, operators, layout, dtype, device, pool)
    except MemoryError as error:
        raise ModelError(str(error) or "the weights do not fit into memory") from error
    finally:
        source.close()
        if cache is not None:
            cache.close()
    stages.ended("weights")
    return HeldModel(files, model_config, forward, "; ".join(filter(None, (reason, kept))), dtype, operators, pool, size)


def _choose(config: EngineConfig, model: ModelConfig, device: torch.device) -> tuple[Operators, StepChoice]:
    """What computes. Raises ModelError where it cannot be what was asked for, or nothing serves this model here."""
    ranks = config.tensor_parallel_size
    try:
        operators = choose_operators(device)
        choice = choose_step(config, model, device, operators)
        if choice.library is None:
            experts = 0 if model.mixture is None else model.mixture.count
            width, quantized = model.intermediate_size // ranks, config.quantization is not None
            sizes = ModelSizes(choice.dtype, model.hidden_size, width, model.head_dim, experts, quantized, config.batch_invariant)
            operators.check(device, sizes)
            if config.batch_invariant and (operators.name != TRITON or ranks > 1):
                needs = "batch_invariant holds for one rank with Triton's kernels or the C++ step"
                raise ModelError(f"{needs}; here {ranks} of {choice.reason}")
    except KernelError as error:
        raise ModelError(f"{config.model}: {error}") from error
    return operators, choice


def _device(config: EngineConfig, rank: int) -> torch.device:
    try:
        return choose_device(rank, config.device)
    except KernelError as error:
        raise ModelError(str(error)) from error


def _empty_pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU they are anonymous memory of their own, so that a page becomes resident only when it is written."""
    size_bytes = math.prod(shape) * dtype.itemsize
    try:
        if device.type == "cpu":
            return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)
    except (OSError, RuntimeError) as error:  # no address space, or torch's own out-of-memory error
        raise ModelError(f"the KV pool of {size_bytes} bytes cannot be allocated: {str(error).splitlines()[0]}") from error
