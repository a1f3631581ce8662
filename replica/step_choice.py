"""Whether the step in C++ computes this model here, and what to tell people about it."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import torch

from kernels.cpu.abi import load_library
from kernels.cpu.build import ISA_VARIABLE, CannotBuild, best_library, cache_directory
from kernels.names import wanted_kernels
from kernels.ops import REFERENCE, Operators, computes_bfloat16
from replica.config import EngineConfig
from replica.conflict import asks_for_cpp_step, conflict, no_cpp_step
from replica.contract.model_error import ModelError
from replica.models.model_config import ModelConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "auto": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StepChoice:
    """`library`: None where torch computes. `reason`: one line, what computes, why, and what would be faster."""

    library: ctypes.CDLL | None
    reason: str
    dtype: torch.dtype  # of weights and KV


def choose_step(config: EngineConfig, model: ModelConfig, device: torch.device, operators: Operators = REFERENCE) -> StepChoice:
    """The C++ step or `operators`. The dtype `auto` is bfloat16, which the C++ step computes on every CPU it runs on; float32 where torch
    would be slower in bfloat16.

    Raises ModelError where settings exclude each other (replica.conflict), or the C++ step was asked for and cannot be had here.
    """
    dtype, kernels = _DTYPES[config.dtype], wanted_kernels()
    problem = conflict(config, model, device.type, kernels)
    if problem:
        raise ModelError(problem)
    library, reason = _find(config, model, device, kernels)
    asked = asks_for_cpp_step(config, kernels)
    if library is None and asked:
        raise ModelError(f"{asked} needs the C++ step: {reason}")
    if library is not None:
        forms = (config.quantization, "KV in int8" if config.kv_cache_dtype == "int8" else None)
        return StepChoice(library, ", ".join(("C++ step", reason, *filter(None, forms))), dtype)
    hint = " (the C++ step is 2 to 3 times as fast)" if device.type == "cpu" and model.mixture is None else ""
    if config.dtype == "auto" and not computes_bfloat16(device):
        dtype = torch.float32
    return StepChoice(None, f"{operators.title}{', ' + config.quantization if config.quantization else ''}: {reason}{hint}", dtype)


def _find(config: EngineConfig, model: ModelConfig, device: torch.device, kernels: str) -> tuple[ctypes.CDLL | None, str]:
    """The library and its instructions, or why there is none."""
    problem = no_cpp_step(config, model, device.type, kernels)
    if problem:
        return None, problem
    try:
        isa, path, missed = best_library(cache_directory(), os.environ.get(ISA_VARIABLE, ""))
        return load_library(path), f"{isa.title} ({missed})" if missed else isa.title
    except (CannotBuild, OSError) as error:
        return None, str(error)
