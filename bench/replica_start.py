"""A replica's engine in a process of its own, from the command to its first step, and its memory: without Ray, router and server.

`python -m bench.replica_start [--form bfloat16|w8a8|w4a8] [--repeats 3]`. The last start counts: the first may compile the step or pack
the weights. Memory is the proportional set size after the step, less the part of the KV pool that is resident.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench import result
from bench.result import Result

FORMS = {"bfloat16": None, "w8a8": "w8a8", "w4a8": "w4a8"}
START_MAX_S = 8.0
MEMORY_MAX_MB = 900.0
PROMPT_TOKENS = 16


def proportional_mb() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


def start(form: str, since: float) -> None:
    """In the measured process, which was started at `since` of the machine's clock: the engine, a step of it, and a line of JSON."""
    from replica.config import EngineConfig
    from replica.contract.messages import SamplingParams
    from replica.runner import ModelRunner
    from replica.step import Draw, Row, Step

    stages = {"interpreter and imports": time.monotonic() - since}
    config = {"dtype": "bfloat16", "quantization": FORMS[form], "num_threads": len(os.sched_getaffinity(0))}
    runner = ModelRunner(EngineConfig.model_validate(config), on_stage=stages.__setitem__)
    since = time.monotonic()
    prompt = list(range(100, 100 + PROMPT_TOKENS))
    pages = list(range(-(-PROMPT_TOKENS // runner.limits.block_size)))
    row = Row(0, prompt, 0, pages, Draw(SamplingParams(seed=0, max_tokens=1, temperature=0.0), 0, prompt, ()))
    outcome = runner.execute(Step(1, (row,))).outcomes[0]
    assert outcome.token is not None, outcome.error
    stages["first step"] = time.monotonic() - since
    stages["all, CPU time"] = time.process_time()
    pool_mb = len(pages) * runner.kv_block_bytes / 1e6
    print(json.dumps({"stages": stages, "memory_mb": proportional_mb() - pool_mb, "kernels": runner.kernels}), flush=True)


def measured(form: str) -> tuple[float, dict[str, object]]:
    """Seconds from the command to the end of the first step, and what the process said."""
    since = time.monotonic()
    command = [sys.executable, "-m", "bench.replica_start", "--form", form, "--measured", str(since)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.monotonic() - since
    if process.returncode:
        raise SystemExit(f"the replica's process ended with {process.returncode}")
    return seconds, json.loads(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=sorted(FORMS), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measured", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measured is not None:
        start(options.form, options.measured)
        return 0
    runs = [measured(options.form) for _ in range(options.repeats)]
    seconds, said = runs[-1]
    stages = said["stages"]
    assert isinstance(stages, dict) and isinstance(said["memory_mb"], float)
    outcome = Result(
        f"replica-start-{options.form}",
        {"kernels": str(said["kernels"]), "repeats": str(options.repeats)},
        metrics=(
            result.at_most("start.first_step", seconds, START_MAX_S, "s"),
            result.plain("start.first_run", runs[0][0], "s"),
            result.plain("start.median", statistics.median(each for each, _ in runs), "s"),
            *(result.plain(f"start.stage.{name.replace(',', '').replace(' ', '_')}", value, "s") for name, value in stages.items()),
            result.at_most("memory.pss_without_pool", said["memory_mb"], MEMORY_MAX_MB, "MB"),
        ),
    )
    result.show(outcome)
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
