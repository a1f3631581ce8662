"""Compiles every kernel for GPUs that are not here, and holds what comes out against the baseline.

    python -m bench.kernels.aot               everything, compared with bench/kernels/baselines/triton-<version>.json
    python -m bench.kernels.aot --write       everything, and the baseline written anew (look at the difference before it is committed)
    python -m bench.kernels.aot --architectures sm_90 --kernels paged_attention,rms_norm

Its own process: kernels that are interpreted and kernels that are compiled cannot share one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from bench.kernels.baseline import Table, path_of, problems, read_baseline, write_baseline
from bench.kernels.resources import Resources

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")


def compile_all(architecture: str, calls: Sequence[tuple[str, Callable[[], object]]]) -> Table:
    """Of every distinct kernel that the named calls launch on `architecture`. What does not compile raises."""
    from bench.kernels.launches import compile_launch, launches_of
    from bench.kernels.resources import read_resources

    compiled: dict[str, Any] = {}
    for name, call in calls:
        for launch in launches_of(call, architecture):
            key = f"{architecture} | {name} | {launch.name}"
            if key not in compiled:
                try:
                    compiled[key] = compile_launch(launch, architecture)
                except Exception as error:
                    raise RuntimeError(f"{key}: {error}") from error
    return dict(zip(compiled, read_resources(list(compiled.values()), architecture), strict=True))


def compile_subjects(architecture: str, kernels: frozenset[str], few: bool, part: tuple[int, int]) -> Table:
    """Of the subjects of `kernels` (empty: all), or of the `few` that tests compile; part (i, n): every n-th of them, from the i-th."""
    import torch

    from bench.kernels.subject import Ground
    from bench.kernels.subjects import ahead_of_time, quick

    torch.set_num_threads(1)
    subjects = quick(architecture) if few else ahead_of_time()
    chosen = [each for each in subjects if not kernels or each.kernel in kernels]
    calls = [(each.name, lambda each=each: each.build(Ground(torch.device("cpu")))()) for each in chosen[part[0] :: part[1]]]
    return compile_all(architecture, calls)


def names_expected_wide(architectures: Sequence[str]) -> frozenset[str]:
    from bench.kernels.subjects import ahead_of_time

    kernels = {"paged_attention": "chunk_kernel", "matmul_batch_invariant": "matmul_kernel"}
    wide = [each for each in ahead_of_time() if each.wide_matrix]
    return frozenset(f"{place} | {each.name} | {kernels[each.kernel]}" for place in architectures for each in wide)


def import_once() -> None:
    """What takes seconds, before processes fork from this one: torch, the compiler, and the digest of it that names what it makes."""
    from triton.runtime.cache import triton_key

    from bench.kernels import launches, resources, subjects  # noqa: F401

    triton_key()


def gather(architectures: Sequence[str], kernels: frozenset[str] = frozenset(), *, few: bool = False, jobs: int = 1) -> Table:
    """What all that is asked for takes, compiled by `jobs` processes."""
    table: Table = {}
    if jobs == 1:
        for architecture in architectures:
            table |= compile_subjects(architecture, kernels, few, (0, 1))
        return table
    import_once()
    parts = [(architecture, kernels, few, (index, jobs)) for architecture in architectures for index in range(jobs)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        for made in pool.map(compile_subjects, *zip(*parts, strict=True)):
            table |= made
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", default=",".join(ARCHITECTURES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--kernels", default="", help="comma-separated names of pages; default: all")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--write", action="store_true", help="write the baseline instead of comparing with it")
    parser.add_argument("--few", action="store_true", help="only what the tests compile")
    args = parser.parse_args(argv)
    import triton

    architectures = args.architectures.split(",")
    path = path_of(triton.__version__)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        table = gather(architectures, frozenset(filter(None, args.kernels.split(","))), few=args.few, jobs=args.jobs)
    if args.write:
        whole = architectures == list(ARCHITECTURES) and not args.kernels and not args.few
        known = {} if whole or not path.exists() else read_baseline(path)  # what a part does not compile stays
        write_baseline(path, {**known, **table})
        lines = problems(table, table, names_expected_wide(architectures))
        print("\n".join([*lines, f"{len(table)} kernels written to {path}, {len(lines)} problems"]))
        return 1 if lines else 0
    baseline: dict[str, Resources] = read_baseline(path) if path.exists() else {}
    lines = problems(table, baseline, names_expected_wide(architectures))
    print("\n".join([*lines, f"{len(table)} kernels compiled with triton {triton.__version__}, {len(lines)} problems"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
