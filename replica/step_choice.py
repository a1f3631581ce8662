"""Whether the step in C++ computes this model here, and what to tell people about it."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import torch

from kernels.cpu.abi import load_library
from kernels.cpu.build import ISA_VARIABLE, CannotBuild, best_library, cache_directory
from kernels.cpu.decoder import unfit
from kernels.ops import CPU_STEP, KERNELS_VARIABLE, REFERENCE, TRITON, Operators, computes_bfloat16, wanted_kernels
from replica.config import WEIGHT_ONLY, EngineConfig
from replica.contract.model_error import ModelError
from replica.models.model_config import ModelConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "auto": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StepChoice:
    """`library`: None where torch computes. `reason`: one line, what computes, why, and what would be faster."""

    library: ctypes.CDLL | None
    reason: str
    dtype: torch.dtype  # of weights and KV


def choose_step(config: EngineConfig, model: ModelConfig, device: torch.device, ranks: int, operators: Operators = REFERENCE) -> StepChoice:
    """The C++ step or `operators`. The dtype `auto` is bfloat16, which the C++ step computes on every CPU it runs on; float32 where torch
    would be slower in bfloat16.

    Raises ModelError where the C++ step was asked for (RANTANG_KERNELS=cpu, one of its quantizations) and cannot be had, or a quantization
    of weights alone where nothing computes it.
    """
    dtype = _DTYPES[config.dtype]
    weight_only = config.quantization in WEIGHT_ONLY
    if weight_only and model.mixture is not None:
        raise ModelError(f"--quantization {config.quantization}: experts are served in the model's dtype only")
    if weight_only and device.type == "cpu" and wanted_kernels() not in (REFERENCE.name, TRITON):
        raise ModelError(
            f"--quantization {config.quantization} is computed by Triton's kernels on a GPU; on a CPU the C++ step has w8a8 and w4a8 "
            f"({KERNELS_VARIABLE}={REFERENCE.name} computes it with torch, slowly)"
        )
    library, reason = _find(config, model, dtype, device, ranks)
    asked = f"--quantization {config.quantization}" if config.quantization and not weight_only else ""
    if config.kv_cache_dtype == "int8":
        asked = "--kv-cache-dtype int8"
    if wanted_kernels() == CPU_STEP:
        asked = f"{KERNELS_VARIABLE}={CPU_STEP}"
    if library is None and asked:
        there = (
            f" (on a GPU there are {', '.join(WEIGHT_ONLY)})"
            if device.type != "cpu" and config.quantization and model.mixture is None
            else ""
        )
        raise ModelError(f"{asked} needs the C++ step: {reason}{there}")
    if library is not None:
        forms = (config.quantization, "KV in int8" if config.kv_cache_dtype == "int8" else None)
        return StepChoice(library, ", ".join(("C++ step", reason, *filter(None, forms))), dtype)
    hint = " (the C++ step is 2 to 3 times as fast)" if device.type == "cpu" and model.mixture is None else ""
    if config.dtype == "auto" and not computes_bfloat16(device):
        dtype = torch.float32
    return StepChoice(None, f"{operators.title}{', ' + config.quantization if config.quantization else ''}: {reason}{hint}", dtype)


def _find(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, ranks: int) -> tuple[ctypes.CDLL | None, str]:
    """The library and its instructions, or why there is none."""
    wanted = wanted_kernels()
    if wanted not in ("", CPU_STEP):
        return None, f"{KERNELS_VARIABLE}={wanted}"
    if device.type != "cpu":
        return None, f"it runs on {device.type}"
    problem = _problem(config, model, dtype, ranks)
    if problem:
        return None, problem
    try:
        isa, path, missed = best_library(cache_directory(), os.environ.get(ISA_VARIABLE, ""))
        return load_library(path), f"{isa.title} ({missed})" if missed else isa.title
    except (CannotBuild, OSError) as error:
        return None, str(error)


def _problem(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, ranks: int) -> str:
    """Why this model and configuration are none for the C++ step; '' when they are."""
    if dtype is not torch.bfloat16:
        return f"the dtype is {str(dtype).removeprefix('torch.')}, not bfloat16"
    if ranks > 1:
        return f"{ranks} ranks share the model"
    if model.mixture is not None:
        return "its feed-forward layers are experts"
    return unfit(
        hidden=model.hidden_size,
        width=model.intermediate_size,
        head_dim=model.head_dim,
        block_size=config.block_size,
    )
