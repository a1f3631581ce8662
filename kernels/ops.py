"""The operators a model is built from, chosen once: by the device, or by RANTANG_KERNELS where that is set."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import names
from kernels.batch import CacheLayout, ModelSizes, PagedBatch
from kernels.errors import KernelError as KernelError
from kernels.names import KERNELS_VARIABLE, TRITON, misnamed, operators_of, wanted_kernels
from kernels.reference.attention_plan import plan_attention
from kernels.reference.copy_blocks import copy_blocks
from kernels.reference.fused_moe import fused_moe
from kernels.reference.gelu_mul import gelu_mul
from kernels.reference.linear_quantized import linear_quantized
from kernels.reference.matmul_batch_invariant import matmul_batch_invariant
from kernels.reference.paged_attention import paged_attention
from kernels.reference.quantized_weight import QuantizedWeight
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope_kv_write import HeadNorms, rope_kv_write
from kernels.reference.sampling import Sampled, SamplingRows, sampling
from kernels.reference.silu_mul import silu_mul

Plan = Any  # what plan_attention made, for the operators beside it alone


@dataclass(frozen=True, slots=True)
class Operators:
    """One implementation of every operator; signatures and meaning are those of kernels/reference."""

    name: str
    title: str  # for people
    check: Callable[[torch.device, ModelSizes], None]  # raises KernelError, with what would work, for a model that is not served
    plan_attention: Callable[[PagedBatch, CacheLayout, torch.dtype, torch.device, int | None], Plan]
    rms_norm: Callable[[Tensor, Tensor, float, Tensor | None], Tensor]
    rope_kv_write: Callable[[Tensor, Tensor, Tensor, Tensor, Plan, HeadNorms | None], Tensor]
    paged_attention: Callable[[Tensor, Tensor, Plan, float], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    gelu_mul: Callable[[Tensor], Tensor]
    copy_blocks: Callable[[Tensor, Sequence[tuple[int, int]]], None]
    matmul_batch_invariant: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    linear_quantized: Callable[[Tensor, QuantizedWeight, Tensor | None], Tensor]
    fused_moe: Callable[[Tensor, Tensor, Tensor, Tensor, int, bool], Tensor]
    sampling: Callable[[Tensor, SamplingRows, int], Sampled]
    draws: bool  # whether `sampling` serves; the host's own draws are faster than the reference's


REFERENCE = Operators(
    names.REFERENCE,
    "torch",
    lambda device, sizes: None,  # torch computes everything
    plan_attention,
    rms_norm,
    rope_kv_write,
    paged_attention,
    silu_mul,
    gelu_mul,
    copy_blocks,
    matmul_batch_invariant,
    linear_quantized,
    fused_moe,
    sampling,
    draws=False,
)


def choose_operators(device: torch.device, wanted: str | None = None) -> Operators:
    """Operators for `device`; `wanted` (else the environment's RANTANG_KERNELS) names an implementation instead.

    An accelerator is served by Triton, and by torch only where that was asked for. Raises KernelError.
    """
    name = wanted_kernels() if wanted is None else wanted
    problem = misnamed(device.type, name)
    if problem:
        raise KernelError(problem)
    return _triton(device) if operators_of(device.type, name) == TRITON else REFERENCE


def _triton(device: torch.device) -> Operators:
    """Imported when they are wanted, so that a machine without an accelerator needs no triton."""
    if importlib.util.find_spec("triton") is None:
        raise KernelError(
            f"triton is not installed: pip install 'rantang[gpu]' for its kernels on {device.type}; "
            f"{KERNELS_VARIABLE}={REFERENCE.name} computes with torch instead"
        )
    from kernels.triton import library, operators

    return Operators(
        TRITON,
        operators.title(device),
        operators.check,
        operators.plan,
        library.rms_norm,
        operators.rope,
        operators.attention,
        library.silu_mul,
        library.gelu_mul,
        operators.copy_blocks,
        library.matmul_batch_invariant,
        operators.linear_quantized,
        library.fused_moe,
        operators.sampling,
        draws=True,
    )


def choose_device(local_rank: int = 0, wanted: str = "auto") -> torch.device:
    """The accelerator of this rank where there is one, else the CPU; or what is `wanted`. Raises KernelError where that is not there.

    An accelerator becomes the calling thread's own, where kernels are launched.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise KernelError(
            f"device cuda: torch {torch.__version__} sees no GPU (CUDA_VISIBLE_DEVICES={'unset' if visible is None else visible!r})"
        )
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def computes_bfloat16(device: torch.device) -> bool:
    """Whether `device` multiplies bfloat16 natively (elsewhere float32 is both faster and better)."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16") or has.get("bf16"))


def use_threads(count: int) -> None:
    """Compute threads of this process. Fewer than cores ÷ processes wastes cores; more makes them wait for one another."""
    torch.set_num_threads(count)
