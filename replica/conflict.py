"""Settings that exclude each other, as far as configuration, model and kind of device tell. No torch, nothing is looked for.

`rantang serve` asks before it starts anything, and each replica again (replica.step_choice, replica.held_model): one rule, two askers.
"""

from __future__ import annotations

from kernels.cpu.sizes import unfit
from kernels.names import CPU_STEP, KERNELS_VARIABLE, REFERENCE, TRITON, misnamed, operators_of
from replica.config import WEIGHT_ONLY, EngineConfig
from replica.models.model_config import ModelConfig

ON_CPU = "--device cpu"


def conflict(config: EngineConfig, model: ModelConfig, device: str, kernels: str) -> str:
    """One line: what was asked for, what it excludes, and what would work where there is such a thing. '' where nothing excludes another.

    device: 'cpu' or 'cuda'. kernels: what RANTANG_KERNELS names, '' for our own choice.
    """
    return (
        misnamed(device, kernels)
        or _weights_alone(config, model, device, kernels)
        or _without_cpp_step(config, model, device, kernels)
        or _batch_invariance(config, model, device, kernels)
    )


def no_cpp_step(config: EngineConfig, model: ModelConfig, device: str, kernels: str) -> str:
    """Why the C++ step does not compute this, whatever the machine; '' where it may."""
    return _obstacle(config, model, device, kernels)[0]


def asks_for_cpp_step(config: EngineConfig, kernels: str) -> str:
    """The setting that nothing else computes; '' where there is none."""
    if kernels == CPU_STEP:
        return f"{KERNELS_VARIABLE}={CPU_STEP}"
    if config.kv_cache_dtype == "int8":
        return "--kv-cache-dtype int8"
    return f"--quantization {config.quantization}" if config.quantization and config.quantization not in WEIGHT_ONLY else ""


def _weights_alone(config: EngineConfig, model: ModelConfig, device: str, kernels: str) -> str:
    if config.quantization not in WEIGHT_ONLY:
        return ""
    if model.mixture is not None:
        return f"--quantization {config.quantization}: experts are served in the model's dtype only; leave it out"
    if device == "cpu" and kernels not in (REFERENCE, TRITON):
        return (
            f"--quantization {config.quantization} is computed by Triton's kernels on a GPU; on a CPU the C++ step has w8a8 and w4a8 "
            f"({KERNELS_VARIABLE}={REFERENCE} computes it with torch, slowly)"
        )
    return ""


def _without_cpp_step(config: EngineConfig, model: ModelConfig, device: str, kernels: str) -> str:
    asked = asks_for_cpp_step(config, kernels)
    problem, remedy = _obstacle(config, model, device, kernels)
    if not asked or not problem:
        return ""
    on_gpu = device != "cpu" and config.quantization and model.mixture is None
    instead = f" (on a GPU there are {', '.join(WEIGHT_ONLY)})" if on_gpu else ""
    return f"{asked} needs the C++ step: {problem}{instead}{f'; it takes {remedy}' if remedy else ''}"


def _batch_invariance(config: EngineConfig, model: ModelConfig, device: str, kernels: str) -> str:
    ranks, operators = config.tensor_parallel_size, operators_of(device, kernels)
    problem, remedy = _obstacle(config, model, device, kernels)
    if not config.batch_invariant or not problem or (operators == TRITON and ranks == 1):
        return ""
    by = "torch" if operators == REFERENCE else "Triton"
    takes = f"; it takes {remedy}" if remedy else ""
    return f"batch_invariant holds for one rank with Triton's kernels or the C++ step; here {ranks} of {by}: {problem}{takes}"


def _obstacle(config: EngineConfig, model: ModelConfig, device: str, kernels: str) -> tuple[str, str]:
    """Why the C++ step does not compute this ('' where it may), and what would make it ('' where nothing does)."""
    ranks = config.tensor_parallel_size
    if kernels not in ("", CPU_STEP):
        return f"{KERNELS_VARIABLE}={kernels}", f"{KERNELS_VARIABLE} unset"
    if model.mixture is not None and device == "cpu":
        return "its feed-forward layers are experts", ""
    if device != "cpu":
        return f"it runs on {device}", ON_CPU if model.mixture is None else ""
    if config.dtype not in ("auto", "bfloat16"):
        return f"the dtype is {config.dtype}, not bfloat16", "--dtype bfloat16"
    if ranks > 1:
        return f"{ranks} ranks share the model", "--tensor-parallel-size 1"
    sizes = {"hidden": model.hidden_size, "width": model.intermediate_size, "head_dim": model.head_dim}
    if problem := unfit(**sizes, block_size=16):
        return problem, ""
    return unfit(**sizes, block_size=config.block_size), "--block-size 16"
