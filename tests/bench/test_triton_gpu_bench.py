"""The GPU bench as far as it goes without one: what it measures is a clock that tells what it is told."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.kernels import gpu_bench, subjects
from bench.kernels.ceilings import measure_ceilings
from bench.kernels.gpu_bench import Check, Report, as_json, check, lines_of, measure_tiles, target_of
from bench.kernels.row_subjects import gate, norm
from bench.kernels.subject import Ground, error_of
from bench.kernels.timing import COPIES_MAX, Ceilings, Device, copies_of, measure
from bench.kernels.whole_step import Sizes, StepShape, make_model, measure_steps, weight_bytes
from kernels.ops import REFERENCE
from kernels.triton.rms_norm import TILES
from kernels.triton.tiles import Tile, forced
from tests.kernels import triton_interpreter  # noqa: F401 - kernels are interpreted here

CPU = torch.device("cpu")
DEVICE = Device("a device", l2_bytes=1 << 20, memory_bytes=1 << 30)
CEILINGS = Ceilings(copy_bytes_per_s=1e9, matmul_operations_per_s=1e12)
BF16 = torch.bfloat16


class FakeTimer:
    """Runs every call once; each is said to have taken `seconds`."""

    def __init__(self, seconds: Sequence[float] = (3.0, 1.0, 2.0), graphed: bool = True) -> None:
        self.seconds, self.graphed, self.counts = list(seconds), graphed, []

    def times_s(self, calls: Sequence[Callable[[], object]], repeats: int) -> tuple[list[float], bool]:
        for call in calls:
            call()
        self.counts.append(len(calls))
        return self.seconds, self.graphed


def test_without_a_device_it_says_so_and_exits_2(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_bench.main([]) == 2
    assert "no CUDA or ROCm device" in capsys.readouterr().err


def test_inputs_are_rotated_until_the_l2_has_forgotten_them() -> None:
    assert copies_of(1 << 20, DEVICE) == 3 and copies_of((1 << 20) + 1, DEVICE) == 3
    assert copies_of(10 << 20, DEVICE) == 1 and copies_of(100, DEVICE) == COPIES_MAX
    assert copies_of(100 << 20, replace(DEVICE, l2_bytes=1 << 29)) == 1, "no more than half the memory holds"


def test_a_measurement_is_the_median_as_fractions_of_the_ceilings() -> None:
    subject, timer = norm(2, 64, BF16), FakeTimer((3e-6, 1e-6, 2e-6))
    found = measure(subject, CPU, replace(DEVICE, l2_bytes=1000), CEILINGS, timer)
    assert found.median_s == 2e-6 and timer.counts == [copies_of(subject.cost.bytes_moved, replace(DEVICE, l2_bytes=1000))]
    assert found.bandwidth == pytest.approx(subject.cost.bytes_moved / 2e-6 / 1e9) and found.arithmetic == 0


def test_ceilings() -> None:
    ceilings = measure_ceilings(CPU, FakeTimer([2.0]), copy_bytes=1000, side=8)
    assert ceilings == Ceilings(1000.0, 512.0)


def test_a_right_kernel_passes_and_a_wrong_one_does_not() -> None:
    right = norm(3, 40, BF16)
    assert check(right, CPU).passed

    def wrong(ground: Ground) -> Callable[[], list[torch.Tensor]]:
        call = right.build(ground)
        return call if ground.exact else lambda: [each * 1.05 for each in call()]

    found = check(replace(right, build=wrong), CPU)
    assert not found.passed and 0.02 < found.error < 0.1

    def poisoned(ground: Ground) -> Callable[[], list[torch.Tensor]]:
        call = right.build(ground)
        return call if ground.exact else lambda: [call()[0], torch.full((3, 40), float("nan"))]

    assert not check(replace(right, build=poisoned), CPU).passed

    def broken(ground: Ground) -> Callable[[], list[torch.Tensor]]:
        raise RuntimeError("no such instruction")

    assert check(replace(right, build=broken), CPU).message == "RuntimeError: no such instruction"


def test_an_error_that_is_no_number_is_the_largest() -> None:
    nan = error_of([torch.ones(2), torch.tensor([float("nan")])], [torch.ones(2), torch.ones(1)])
    assert nan != nan
    assert error_of([torch.zeros(2), torch.ones(2)], [torch.zeros(2), torch.ones(2)]) == 0


def test_candidates_are_measured_one_by_one_and_failures_told() -> None:
    subject = replace(norm(2, 64, BF16), shape="T32 H64")
    found = list(measure_tiles([subject, gate("gelu_mul", 2, 64, BF16)], CPU, replace(DEVICE, l2_bytes=1), CEILINGS, FakeTimer()))
    assert [tile for _, tile, _ in found] == ["warps 2, stages 1", "warps 4, stages 1", "warps 8, stages 1", "warps 16, stages 1"]
    assert TILES.tile("sm_90", BF16, 64) == Tile(warps=1), "afterwards the table serves again"

    class Failing(FakeTimer):
        def times_s(self, calls: Any, repeats: int) -> Any:
            raise RuntimeError("out of shared memory\nmore")

    told = [made for _, _, made in measure_tiles([subject], CPU, replace(DEVICE, l2_bytes=1), CEILINGS, Failing())]
    assert told == ["RuntimeError: out of shared memory"] * 4


def test_a_forced_tile_is_the_only_one() -> None:
    with forced(TILES, Tile(warps=2)):
        assert TILES.tile("sm_90", BF16, 4096) == Tile(warps=2)
    assert TILES.tile("sm_90", BF16, 4096) != Tile(warps=2)


def test_the_table_names_what_is_wrong_missed_and_best() -> None:
    fast, slow = (measure(norm(2, 64, BF16), CPU, replace(DEVICE, l2_bytes=1), CEILINGS, FakeTimer([s])) for s in (1e-6, 9e-6))
    report = Report("a device", "3.9.0", "2.13", CEILINGS)
    report.checks = [Check("one", 1e-8, 1e-6), Check("two", 1e-2, 1e-6), Check("three", float("nan"), 1e-6, "RuntimeError: x")]
    report.measured = [
        replace(fast, name="rms_norm T2048 H4096 + delta bfloat16", bandwidth=0.9),
        replace(slow, name="rms_norm T8192 x", bandwidth=0.4),
    ]
    report.steps = [replace(slow, name="step decode 1 × 1k", graphed=False, bandwidth=0.85)]
    report.tiles = [("s", "warps 2", slow), ("s", "warps 4", fast), ("s", "warps 8", "RuntimeError: y")]
    text = "\n".join(lines_of(report))
    assert "checks: 1 of 3 right" in text and "WRONG two: error 1.0e-02, at most 1e-06" in text and "WRONG three: RuntimeError: x" in text
    assert "reached 85% of bandwidth" in text and "MISSED 85% of bandwidth" in text and "reached 80% of bandwidth  (eager)" in text
    assert "best of 2 tried is warps 4: 1.0 µs" in text
    assert json.loads(as_json(report))["tiles"][2] == ["s", "warps 8", "RuntimeError: y"]


def test_every_target_is_of_something_that_is_measured() -> None:
    aimed = [each.name for each in subjects.to_measure() if target_of(each.name)]
    assert len(aimed) == 14 and len({each.name for each in subjects.to_measure()}) == len(list(subjects.to_measure()))


def test_a_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "to_check", lambda: iter([norm(3, 40, BF16)]))
    monkeypatch.setattr(subjects, "to_measure", lambda: iter([norm(2, 64, BF16)]))
    monkeypatch.setattr(gpu_bench, "measure_ceilings", lambda place, timer: CEILINGS)
    options = argparse.Namespace(no_tiles=False, no_steps=True)
    report = gpu_bench.run(CPU, replace(DEVICE, l2_bytes=1), FakeTimer(), options)
    assert [each.passed for each in report.checks] == [True] and len(report.measured) == 1 and report.tiles == []


def test_steps_of_a_whole_model() -> None:
    sizes = Sizes(layers=2, hidden=64, width=96, heads=4, kv_heads=2, dim=16, vocab=50)
    model = make_model(sizes, REFERENCE, CPU, context=64)
    layer = 128 * 64 + 64 * 64 + 192 * 64 + 64 * 96  # q, k and v; output; gate and up; down
    assert weight_bytes(sizes) == 2 * (2 * layer + 50 * 64)
    found = measure_steps(
        model, sizes, CPU, CEILINGS, FakeTimer([1e-3]), (StepShape("decode 3 × 20", 3, 20, 1), StepShape("prefill", 1, 0, 40))
    )
    assert [each.name for each in found] == ["step decode 3 × 20", "step prefill"]
    cached = 2 * 2 * 2 * 2 * 16 * 3 * 21  # bytes · keys and values · layers · heads · dim · tokens
    assert found[0].bandwidth == pytest.approx((weight_bytes(sizes) + cached) / 1e-3 / 1e9)
    assert found[1].arithmetic > found[0].arithmetic


def test_results_go_where_they_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("a device", "3.9.0", "2.13", CEILINGS, [Check("one", 1.0, 1e-6)])
    for name, value in (("is_available", lambda: True), ("current_device", lambda: 0)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(gpu_bench, "device_of", lambda place: DEVICE)
    monkeypatch.setattr(gpu_bench, "run", lambda *args: report)
    out = tmp_path / "deep" / "gpu.json"
    assert gpu_bench.main(["--out", str(out)]) == 2 and not out.exists(), "the interpreter is no device"
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert gpu_bench.main(["--out", str(out)]) == 1, "a kernel is wrong"
    assert json.loads(out.read_text())["device"] == "a device" and "checks: 0 of 1 right" in capsys.readouterr().out
