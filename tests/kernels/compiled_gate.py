"""Run as a process of its own by test_triton_compiled.py: compiles what the tests compile, and toys to test the gate with.

Prints one line of JSON: what the kernels take, what the gate says of them, and the same of the toys.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from typing import Any

JOBS = min(2, len(os.sched_getaffinity(0)))  # whoever runs the tests in two processes has both of them wait for this


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        sys.stdout.write(json.dumps(_found()) + "\n")


def _found() -> dict[str, Any]:
    import torch
    import triton

    from bench.kernels import baseline
    from bench.kernels.aot import ARCHITECTURES, compile_all, gather, names_expected_wide
    from tests.kernels.toy_kernels import product_kernel, scale, spilling_kernel

    table = gather(ARCHITECTURES, few=True, jobs=JOBS)
    path = baseline.path_of(triton.__version__)
    known = baseline.read_baseline(path) if path.exists() else {}
    wide, large = torch.zeros(128, 128, dtype=torch.bfloat16), torch.zeros(128, 128)
    small, out = torch.zeros(16, 16, dtype=torch.bfloat16), torch.zeros(16, 16)
    toys = compile_all(
        "sm_90",
        [
            ("right", lambda: scale(torch.zeros(4096), 2.0)),
            ("spills", lambda: spilling_kernel[(1,)](wide, large, 128, num_warps=1)),
            ("narrow", lambda: product_kernel[(1,)](small, small, out, 16, 16, 16)),
            ("wide", lambda: product_kernel[(1,)](wide, wide, large, 64, 64, 64)),
        ],
    )
    return {
        "version": triton.__version__,
        "table": {name: asdict(resources) for name, resources in table.items()},
        "problems": baseline.problems(table, known, names_expected_wide(ARCHITECTURES)),
        "toys": {name: asdict(resources) for name, resources in toys.items()},
        "toy_problems": baseline.problems(toys, toys, frozenset({"sm_90 | narrow | product_kernel", "sm_90 | wide | product_kernel"})),
    }


if __name__ == "__main__":
    main()
