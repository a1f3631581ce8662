"""One call that says what the kernels are worth on the GPU at hand: right or wrong first, then how fast.

    python -m bench.kernels.gpu_bench [--out FILE] [--no-tiles] [--no-steps]

1. every kernel against float64 on ugly shapes; 2. the ceilings: a copy, an 8k bfloat16 product; 3. each kernel over shapes, then over
tiles that are not in its table; 4. decode steps and prefills of a Llama-8B's shape. Medians of graph replays, inputs rotated beyond the
L2, fractions of the ceilings of the same call. Exits 0; 1 where a kernel is wrong; 2 without a device, or where TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.kernels.ceilings import device_of, measure_ceilings
from bench.kernels.subject import Ground, Subject, error_of
from bench.kernels.timing import Ceilings, Device, DeviceTimer, Measured, Timer, measure
from kernels.triton.tiles import interpreted

NO_DEVICE = 2
RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    error: float  # by norm, against float64; NaN where something is
    tolerance: float
    message: str = ""  # of what was raised

    @property
    def passed(self) -> bool:
        return not self.message and self.error <= self.tolerance


@dataclass
class Report:
    device: str
    triton: str
    torch: str
    ceilings: Ceilings
    checks: list[Check] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    tiles: list[tuple[str, str, Measured | str]] = field(default_factory=list)  # subject, tile, what came of it
    steps: list[Measured] = field(default_factory=list)


def target_of(name: str) -> tuple[str, float] | None:
    """What is aimed at on an H200: of the copy's bandwidth, or of the product's arithmetic."""
    for beginnings, kind, fraction in (
        (("rms_norm T2048", "rms_norm T8192", "silu_mul T2048", "silu_mul T8192"), "bandwidth", 0.85),
        (("rope_kv_write T2048", "rope_kv_write T8192"), "bandwidth", 0.80),
        (("paged_attention 64×(4095,1)", "paged_attention 256×(1023,1)"), "bandwidth", 0.80),
        (("paged_attention 8×(4095,1)",), "bandwidth", 0.60),
        (("paged_attention 1×(0,8192)",), "arithmetic", 400 / 790),
        (("matmul_batch_invariant M2048", "matmul_batch_invariant M8192"), "arithmetic", 0.75),
        (("step decode",), "bandwidth", 0.80),
    ):
        if name.startswith(beginnings):
            return kind, fraction
    return None


def check(subject: Subject, place: torch.device) -> Check:
    try:
        right = [each.clone() for each in subject.build(Ground(place, exact=True))()]
        ours = subject.build(Ground(place))()
    except Exception as error:
        return Check(subject.name, float("nan"), subject.tolerance, f"{type(error).__name__}: {str(error)[:200]}")
    if subject.kernel == "sampling":
        from bench.kernels.sampling_subjects import tokens_agree

        if not tokens_agree(ours, right):
            return Check(subject.name, float("nan"), subject.tolerance, "other tokens than the reference")
        same = ours[0] == right[0]
        ours, right = [each[same] for each in ours[1:]], [each[same] for each in right[1:]]
    return Check(subject.name, error_of(ours, right), subject.tolerance)


def measure_tiles(
    subjects: Sequence[Subject], place: torch.device, device: Device, ceilings: Ceilings, timer: Timer
) -> Iterator[tuple[str, str, Measured | str]]:
    """Every candidate; one that cannot be compiled or launched is told with its reason."""
    from bench.kernels.candidates import tried_on
    from kernels.triton.tiles import forced

    for subject in subjects:
        for table, tile in tried_on(subject.kernel, subject.shape):
            sides = ", ".join(f"{key} {value}" for key, value in asdict(tile).items() if value)
            try:
                with forced(table, tile):
                    yield subject.name, sides, measure(subject, place, device, ceilings, timer)
            except Exception as error:
                yield subject.name, sides, f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"


def lines_of(report: Report) -> list[str]:
    """The short table."""
    wrong, ceilings = [each for each in report.checks if not each.passed], report.ceilings
    lines = [
        f"{report.device}, triton {report.triton}, torch {report.torch}",
        f"ceilings: copy {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s, product {ceilings.matmul_operations_per_s / 1e12:.0f} TFLOP/s",
        f"checks: {len(report.checks) - len(wrong)} of {len(report.checks)} right",
        *(f"  WRONG {each.name}: {each.message or f'error {each.error:.1e}, at most {each.tolerance:.0e}'}" for each in wrong),
        f"{'':72} {'µs':>9} {'of copy':>8} {'of product':>10}  target",
    ]
    for each in (*report.measured, *report.steps):
        target = target_of(each.name)
        told = ""
        if target:
            reached = each.bandwidth if target[0] == "bandwidth" else each.arithmetic
            told = f"  {'reached' if reached >= target[1] else 'MISSED'} {target[1]:.0%} of {target[0]}"
        eager = "" if each.graphed else "  (eager)"
        lines.append(f"{each.name[:72]:72} {each.median_s * 1e6:9.1f} {each.bandwidth:8.1%} {each.arithmetic:10.1%}{told}{eager}")
    for name in dict.fromkeys(name for name, _, _ in report.tiles):
        tried = [(tile, made) for each, tile, made in report.tiles if each == name and isinstance(made, Measured)]
        if tried:
            tile, best = min(tried, key=lambda pair: pair[1].median_s)
            lines.append(f"tiles: {name}: best of {len(tried)} tried is {tile}: {best.median_s * 1e6:.1f} µs")
    return lines


def as_json(report: Report) -> str:
    return json.dumps({**asdict(report), "tiles": [[name, tile, _plain(made)] for name, tile, made in report.tiles]}, indent=1)


def _plain(made: Measured | str) -> Any:
    return made if isinstance(made, str) else asdict(made)


def run(place: torch.device, device: Device, timer: Timer, options: argparse.Namespace) -> Report:
    import triton

    from bench.kernels.subjects import to_check, to_measure
    from kernels.names import TRITON
    from kernels.ops import choose_operators

    report = Report(device.name, triton.__version__, torch.__version__, measure_ceilings(place, timer))
    report.checks = [check(subject, place) for subject in to_check()]
    subjects = list(to_measure())
    report.measured = [measure(subject, place, device, report.ceilings, timer) for subject in subjects]
    if not options.no_tiles:
        report.tiles = list(measure_tiles(subjects, place, device, report.ceilings, timer))
    if not options.no_steps:
        from bench.kernels.whole_step import Sizes, make_model, measure_steps

        sizes = Sizes()
        model = make_model(sizes, choose_operators(place, TRITON), place)
        report.steps = measure_steps(model, sizes, place, report.ceilings, timer)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.gpu_bench", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the JSON (default: bench/results/gpu-<time>.json)")
    parser.add_argument("--no-tiles", action="store_true", help="measure only the tiles that serve")
    parser.add_argument("--no-steps", action="store_true", help="no whole decode steps and prefills")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA or ROCm device: nothing was checked, nothing was measured", file=sys.stderr)
        return NO_DEVICE
    if interpreted():
        print("TRITON_INTERPRET=1: kernels would be interpreted, nothing was checked, nothing was measured", file=sys.stderr)
        return NO_DEVICE
    place = torch.device("cuda", torch.cuda.current_device())
    report = run(place, device_of(place), DeviceTimer(), options)
    print("\n".join(lines_of(report)))
    out = options.out or RESULTS / time.strftime("gpu-%Y%m%d-%H%M%S.json", time.gmtime())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(as_json(report) + "\n")
    print(f"written to {out}")
    return 0 if all(each.passed for each in report.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
