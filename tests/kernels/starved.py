"""Run by test_cpu_step in its own process: a team that cannot have all its threads is refused, and those it had are gone."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

from kernels.batch import CacheLayout
from kernels.cpu.abi import load_library
from kernels.cpu.decoder import Decoder
from tests.kernels.plain_decoder import BLOCK, Sizes, build

THREADS = 256
ROOM_BYTES = 96 * 1024**2  # stacks of a few threads


def run(path: str) -> None:
    library, sizes = load_library(Path(path)), Sizes()
    model = build(sizes).model
    pool = torch.zeros(sizes.layers, 1, 2, sizes.kv_heads, BLOCK, sizes.dim, dtype=torch.bfloat16)
    layout = CacheLayout(sizes.kv_heads, BLOCK, sizes.dim)
    before = len(os.listdir("/proc/self/task"))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, hard))
    try:
        Decoder(library, model, layout, pool, THREADS)
    except MemoryError as error:
        print(error)  # noqa: T201
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    print(len(os.listdir("/proc/self/task")) - before)  # noqa: T201
    print(Decoder(library, model, layout, pool, 3).logits(torch.ones(1, sizes.hidden)).isfinite().all().item())  # noqa: T201


if __name__ == "__main__":
    run(sys.argv[1])
