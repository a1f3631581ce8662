"""The formulas of kernels/triton/costs.py against what the kernels load, store and multiply in the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.kernels.attention_subjects import Rows, attention, rope
from bench.kernels.row_subjects import copies, experts, gate, matmul, norm, quantized
from bench.kernels.sampling_subjects import GREEDY, sampler
from bench.kernels.subject import Ground, Subject, error_of
from tests.kernels import triton_interpreter  # noqa: F401 - for what it installs
from tests.kernels.triton_memory import counted

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
MIXED = ((99, 1), (600, 1), (40, 33))
INDICES = 0.02  # slots, tables and plans, which the formulas leave out


@pytest.mark.parametrize(
    "subject",
    [
        norm(3, 200, BF16),
        norm(3, 200, FP32, delta=False),
        gate("silu_mul", 3, 1100, BF16),
        gate("gelu_mul", 2, 300, FP32),
        matmul(128, 128, 128, BF16),
        copies(3, 2, 500, FP32),
        rope(Rows(MIXED, 4, 2, 64), BF16, norms=True),
        rope(Rows(MIXED, 4, 2, 64, form="int8"), BF16),
        attention(Rows(MIXED[:2], 4, 2, 64), FP32),
        attention(Rows(MIXED[2:], 4, 2, 64), BF16),
        attention(Rows(MIXED[:2], 4, 2, 64, form="fp8"), BF16),
        attention(Rows(MIXED[:2], 4, 2, 64, window=90), FP32),
    ],
    ids=lambda subject: subject.name,
)
def test_bytes_and_result(subject: Subject) -> None:
    """Bytes within what indices take; and the result that of the reference in float64."""
    call = subject.build(Ground(CPU))
    with counted() as traffic:
        ours = call()
    assert subject.cost.bytes_moved <= traffic.moved <= subject.cost.bytes_moved * (1 + INDICES)
    assert error_of(ours, subject.build(Ground(CPU, exact=True))()) <= subject.tolerance


@pytest.mark.parametrize(
    "subject",
    [
        matmul(128, 128, 64, BF16),
        quantized("int4", 16, 128, 64, BF16),
        quantized("fp8", 32, 128, 96, FP32),
        experts(32, 2, 2, 64, 32, FP32),
    ],
    ids=lambda subject: subject.name,
)
def test_operations_of_a_product_that_fills_its_tiles(subject: Subject) -> None:
    with counted() as traffic:
        subject.build(Ground(CPU))()
    assert traffic.operations == subject.cost.operations


def test_operations_of_attention_are_no_more_than_tiles_make_them() -> None:
    """4 heads on one KV head, 32 queries: a tile of 128 rows. Masked keys and what fills up tiles come on top: less than half again."""
    subject = attention(Rows(((480, 32),), 4, 1, 64), BF16)
    with counted() as traffic:
        subject.build(Ground(CPU))()
    assert subject.cost.operations <= traffic.operations <= 1.5 * subject.cost.operations


@pytest.mark.parametrize(
    ("subject", "more"),
    [
        (quantized("int4", 2, 128, 96, BF16), 1.0),  # partial sums, which are to stay in the L2
        (experts(4, 3, 2, 64, 48, FP32), 0.3),  # the routing
        (sampler(2, 5000, GREEDY), 0.1),
    ],
    ids=lambda value: value.name if isinstance(value, Subject) else "",
)
def test_bytes_of_what_keeps_more_on_the_side(subject: Subject, more: float) -> None:
    call = subject.build(Ground(CPU))
    with counted() as traffic:
        call()
    assert subject.cost.bytes_moved <= traffic.moved <= subject.cost.bytes_moved * (1 + more)


def _twice(subject: Subject) -> Callable[[], object]:
    call = subject.build(Ground(CPU))
    other = subject.build(Ground(CPU, seed=1))
    return lambda: (call(), other())


def test_a_kernel_that_moves_more_than_it_says_is_seen() -> None:
    """The control: the same bound, and twice the work."""
    subject = norm(3, 200, BF16)
    with counted() as traffic:
        _twice(subject)()
    assert traffic.moved > subject.cost.bytes_moved * (1 + INDICES)
