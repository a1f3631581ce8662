"""Which kernels serve: chosen once, by device or by name, never silently something else; and operators that torch can trace."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.batch import CacheLayout, ModelSizes, PagedBatch
from kernels.ops import REFERENCE, KernelError, Operators, choose_device, choose_operators
from kernels.reference.quantized_weight import quantize_int4
from kernels.reference.rope_kv_write import HeadNorms
from kernels.reference.sampling import SamplingRows
from kernels.triton import tiles
from replica.config import EngineConfig
from replica.contract.model_error import ModelError
from replica.runner import ModelRunner
from tests.kernels import triton_interpreter  # noqa: F401 - for what it installs
from tests.replica.tiny_llama import write_tiny_llama

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
LAYOUT = CacheLayout(2, 4, 8)


@pytest.fixture(scope="module")
def triton() -> Operators:
    return choose_operators(CPU, "triton")


@pytest.fixture(autouse=True)
def forget_architectures() -> None:
    tiles._architecture.cache_clear()


def device_is(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)


def test_a_cpu_is_served_by_torch_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, triton: Operators) -> None:
    monkeypatch.delenv("RANTANG_KERNELS", raising=False)
    assert choose_operators(CPU) is REFERENCE and triton.name == "triton"
    monkeypatch.setenv("RANTANG_KERNELS", "triton")
    assert choose_operators(CPU).title == triton.title and "in the interpreter" in triton.title


def test_a_gpu_is_served_by_triton_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANTANG_KERNELS", raising=False)
    device_is(monkeypatch, (9, 0))
    assert choose_operators(CUDA).title.endswith("kernels for sm_90 in the interpreter")
    monkeypatch.setenv("RANTANG_KERNELS", "reference")
    assert choose_operators(CUDA) is REFERENCE
    monkeypatch.setenv("RANTANG_KERNELS", "cuda")
    with pytest.raises(KernelError, match=r"unknown kernels \(known: cpu, reference, triton\)"):
        choose_operators(CUDA)
    monkeypatch.setenv("RANTANG_KERNELS", "cpu")
    assert choose_operators(CPU) is REFERENCE
    with pytest.raises(KernelError, match=r"RANTANG_KERNELS=cpu is the C\+\+ step of a CPU; on cuda there are triton and reference"):
        choose_operators(CUDA)


def test_a_rank_launches_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []
    for name, value in (("is_available", lambda: True), ("device_count", lambda: 4), ("set_device", used.append)):
        monkeypatch.setattr(torch.cuda, name, value)
    assert choose_device(6) == torch.device("cuda", 2) and used == [torch.device("cuda", 2)]


@pytest.mark.parametrize(
    ("capability", "sizes", "complaint"),
    [
        ((7, 5), {}, r"has no tile for sm_75 \(it has for sm_80, sm_90, sm_100, gfx942\); RANTANG_KERNELS=reference"),
        ((9, 0), {"dtype": torch.float64}, "does not compute float64 on sm_90"),
        ((9, 0), {"head_dim": 512}, "computes sizes up to 256 in bfloat16 on sm_90, not 512"),
        ((9, 0), {"hidden": 1 << 16}, "not 65536"),
        ((9, 0), {"experts": 1025}, "fused_moe: 1025 experts, at most 1024"),
        ((9, 0), {"experts": 1024}, ""),
        ((9, 0), {}, ""),
    ],
)
def test_what_no_kernel_serves_is_said_at_start(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], sizes: dict[str, Any], complaint: str
) -> None:
    device_is(monkeypatch, capability)
    asked = ModelSizes(**{"dtype": torch.bfloat16, "hidden": 4096, "width": 14336, "head_dim": 128, **sizes})
    operators = choose_operators(CUDA, "triton")
    if complaint:
        with pytest.raises(KernelError, match=complaint):
            operators.check(CUDA, asked)
    else:
        operators.check(CUDA, asked)


@pytest.mark.parametrize(
    ("table", "uses"),
    [
        ("linear_quantized", {"quantized": True}),
        ("matmul_batch_invariant", {"batch_invariant": True}),
        ("fused_moe, up", {"experts": 8}),
        ("fused_moe, down", {"experts": 8}),
    ],
)
def test_a_kernel_is_asked_for_by_a_model_that_uses_it(monkeypatch: pytest.MonkeyPatch, table: str, uses: dict[str, Any]) -> None:
    """As if it had no tile anywhere."""
    device_is(monkeypatch, (9, 0))
    tile = tiles.TileTable.tile

    def lacking(self: tiles.TileTable, *asked: Any) -> tiles.Tile:
        if self.kernel == table:
            raise KernelError(f"{table} has no tile")
        return tile(self, *asked)

    monkeypatch.setattr(tiles.TileTable, "tile", lacking)
    operators, plain = choose_operators(CUDA, "triton"), ModelSizes(torch.bfloat16, 4096, 14336, 128)
    operators.check(CUDA, plain)
    with pytest.raises(KernelError, match=f"{table} has no tile"):
        operators.check(CUDA, dataclasses.replace(plain, **uses))


def test_without_triton_a_gpu_is_refused_not_served_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KernelError, match=r"triton is not installed: pip install 'rantang\[gpu\]'.*RANTANG_KERNELS=reference"):
        choose_operators(CUDA, "")


def test_without_its_interpreter_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(KernelError, match=r"do not run on cpu \(TRITON_INTERPRET=1"):
        choose_operators(CPU, "triton")


def test_a_runner_says_what_serves_and_refuses_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = str(write_tiny_llama(tmp_path / "m", num_hidden_layers=1))
    config = EngineConfig(model=model, dtype="float32", num_gpu_blocks_override=4, num_threads=1)
    monkeypatch.setenv("RANTANG_KERNELS", "triton")
    assert ModelRunner(config).kernels.startswith("Triton 3.") and "RANTANG_KERNELS=triton" in ModelRunner(config).kernels
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    tiles._architecture.cache_clear()
    with pytest.raises(ModelError, match="Triton kernels do not run on cpu"):
        ModelRunner(config)


def checked(operator: Any, *args: Any) -> None:
    """By torch: that the schema tells the truth about what is written, and that the fake gives what the kernel gives."""
    torch.library.opcheck(operator, args)


def test_operators_are_what_they_say_they_are(triton: Operators) -> None:
    from kernels.triton import library

    stream, weight = torch.randn(3, 40), torch.rand(40)
    checked(library.rms_norm, stream, weight.bfloat16(), 1e-5, torch.randn(3, 40).bfloat16())
    checked(library.rms_norm, stream, weight, 1e-5)
    checked(library.silu_mul, torch.randn(3, 24))
    checked(library.gelu_mul, torch.randn(3, 24), "none")
    checked(library.matmul_batch_invariant, torch.randn(3, 24), torch.randn(5, 24), torch.randn(5))
    checked(library.copy_blocks, torch.randn(2, 4, 8), [0, 1, 2, 3])


def test_operators_of_quantised_layers_experts_and_sampling(triton: Operators) -> None:
    """Each by its schema and fake alone: torch's whole check runs a kernel a dozen times."""
    from kernels.triton import library

    weight = quantize_int4(torch.randn(5, 40))
    told = (weight.form, [5, 40], weight.values, weight.scales, weight.minima, torch.randn(5))
    numbers, counts = torch.tensor([[0.7, 0.9, 0.0, 1.0, 0.0, 0.0]], dtype=torch.float64), torch.tensor([[1, 0, 5, 3]])
    quick = ("test_schema", "test_faketensor")
    torch.library.opcheck(library.linear_quantized, (torch.randn(3, 40), *told), test_utils=quick)
    experts = (torch.randn(3, 16), torch.randn(3, 4), torch.randn(4, 32, 16), torch.randn(4, 16, 16), 2)
    torch.library.opcheck(library.fused_moe, experts, test_utils=quick)
    torch.library.opcheck(library.sampling, (torch.randn(1, 50), numbers, counts, [None] * 3, [], [], 2), test_utils=quick)
    rows = SamplingRows(numbers, counts)
    ours, right = triton.sampling(torch.arange(50.0)[None], rows, 2), REFERENCE.sampling(torch.arange(50.0)[None], rows, 2)
    assert ours.tokens.tolist() == right.tokens.tolist() and torch.allclose(ours.top_logprobs, right.top_logprobs)


@pytest.mark.parametrize("norms", [False, True])
def test_operators_of_attention(triton: Operators, norms: bool) -> None:
    from kernels.triton import library

    batch = PagedBatch(np.array([5, 0], np.int32), np.array([1, 3], np.int32), np.array([[2, 0], [1, 1]], np.int32))
    plan = triton.plan_attention(batch, LAYOUT, torch.float32, CPU, 3)
    cache, qkv = torch.randn(4, 2, 2, 4, 8), torch.randn(4, (4 + 2 * 2) * 8)
    factors = [torch.randn(4, 8), torch.randn(4, 8), *((torch.rand(8), torch.rand(8)) if norms else ())]
    checked(library.rope_kv_write, qkv, factors, cache, plan.tensors, plan.numbers, 1e-5, None)
    checked(library.paged_attention, torch.randn(4, 32), cache, plan.tensors, plan.numbers, 0.3, None, None)


def test_a_schema_that_lies_is_caught() -> None:
    """The control of the two above: an operator that writes to what its schema says it only reads."""
    from kernels.triton.rms_norm import rms_norm

    lying = torch.library.Library("rantang_lying", "DEF")
    lying.define("norm(Tensor residual, Tensor weight, float epsilon, Tensor? delta=None) -> Tensor")
    lying.impl("norm", rms_norm, "CPU")
    torch.library.register_fake("rantang_lying::norm", lambda x, weight, epsilon, delta=None: torch.empty_like(x), lib=lying)
    with pytest.raises(Exception, match="mutat"):
        checked(torch.ops.rantang_lying.norm.default, torch.randn(3, 16), torch.rand(16), 1e-5, torch.randn(3, 16))


def test_both_implementations_of_every_operator(triton: Operators) -> None:
    """One name, two implementations: float32 by norm, on one small mixed batch."""
    batch = PagedBatch(np.array([5, 0], np.int32), np.array([1, 3], np.int32), np.array([[2, 0], [1, 1]], np.int32))
    generator = torch.Generator().manual_seed(1)
    qkv, cosine, sine = (torch.randn(4, width, generator=generator) for width in (64, 4, 4))
    cosine, sine = torch.cat((cosine, cosine), 1), torch.cat((-sine, sine), 1)
    norms = HeadNorms(torch.rand(8, generator=generator), torch.rand(8, generator=generator), 1e-5)
    outs = []
    for operators in (REFERENCE, triton):
        pool = torch.randn(2, 4, 2, 2, 4, 8, generator=torch.Generator().manual_seed(2))
        operators.copy_blocks(pool, [(2, 3), (0, 2)])
        plan = operators.plan_attention(batch, LAYOUT, torch.float32, CPU, None)
        queries = operators.rope_kv_write(qkv, cosine, sine, pool[0], plan, norms)
        stream = torch.ones(4, 32)
        attended = operators.paged_attention(queries, pool[0], plan, 0.3)
        normed = operators.rms_norm(stream, torch.ones(32), 1e-5, attended)
        product = operators.matmul_batch_invariant(normed, torch.eye(32), None)
        outs.append((pool, stream, operators.silu_mul(product), operators.gelu_mul(product)))
    for ours, right in zip(outs[1], outs[0], strict=True):
        assert float((ours - right).norm() / right.norm()) < 1e-6
