"""The operators a model is built from, chosen once: by the device, or by RANTANG_KERNELS where that is set."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.batch import CacheLayout, PagedBatch
from kernels.reference.attention_plan import AttentionPlan, plan_attention
from kernels.reference.copy_blocks import copy_blocks
from kernels.reference.paged_attention import paged_attention
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope_kv_write import HeadNorms, rope_kv_write
from kernels.reference.silu_mul import silu_mul

KERNELS_VARIABLE = "RANTANG_KERNELS"
CPU_STEP = "cpu"  # not operators: a whole step in C++ (kernels/cpu)


class KernelError(Exception):
    """The kernels that were asked for cannot run here. One line, for the user."""


@dataclass(frozen=True, slots=True)
class Operators:
    """One implementation of every operator; signatures and meaning are those of kernels/reference."""

    name: str
    plan_attention: Callable[[PagedBatch, CacheLayout, torch.dtype, torch.device, int | None], AttentionPlan]
    rms_norm: Callable[[Tensor, Tensor, float, Tensor | None], Tensor]
    rope_kv_write: Callable[[Tensor, Tensor, Tensor, Tensor, AttentionPlan, HeadNorms | None], Tensor]
    paged_attention: Callable[[Tensor, Tensor, AttentionPlan, float], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    copy_blocks: Callable[[Tensor, Sequence[tuple[int, int]]], None]


REFERENCE = Operators("reference", plan_attention, rms_norm, rope_kv_write, paged_attention, silu_mul, copy_blocks)
_BY_NAME = {REFERENCE.name: REFERENCE}
_BY_DEVICE = {"cpu": REFERENCE, "cuda": REFERENCE}


def choose_operators(device: torch.device, wanted: str | None = None) -> Operators:
    """Operators for `device`; `wanted` (else the environment's RANTANG_KERNELS) names an implementation instead."""
    name = wanted_kernels() if wanted is None else wanted
    if name in ("", CPU_STEP):
        return _BY_DEVICE[device.type]
    if name not in _BY_NAME:
        raise KernelError(f"{KERNELS_VARIABLE}={name}: unknown kernels (known: {', '.join(sorted([*_BY_NAME, CPU_STEP]))})")
    return _BY_NAME[name]


def wanted_kernels() -> str:
    """What the environment's RANTANG_KERNELS names; '' where it leaves the choice to us."""
    return os.environ.get(KERNELS_VARIABLE, "")


def choose_device(local_rank: int = 0, wanted: str = "auto") -> torch.device:
    """The accelerator of this rank where there is one, else the CPU; or what is `wanted`. Raises KernelError where that is not there."""
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise KernelError(
            f"device cuda: torch {torch.__version__} sees no GPU (CUDA_VISIBLE_DEVICES={'unset' if visible is None else visible!r})"
        )
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
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
