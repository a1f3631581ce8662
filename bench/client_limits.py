"""What the load client itself can bear: 1,000 streams of 20 tokens/s from a mock worker, each of the two on a core of its own.

The mock writes into every token when it sent it, on the clock that all processes of a machine share. What the client adds is
the time from then until it has the token in its hands, the kernel's loopback included. Both run ahead of the machine's other
programs where that is allowed: a core that is lent to somebody else for 4 ms is not the client's lateness.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median

import uvloop

from bench import result
from bench.arrivals import evenly
from bench.connection import Target
from bench.descriptors import allow
from bench.load_client import LoadClient, open_loop
from bench.measurement import no_collection
from bench.mock_openai import STAMP_RANGE_US
from bench.prompt_style import PromptStyle
from bench.quantiles import quantile
from bench.record import RequestRecord
from bench.result import ROOT, Result, WorkResult
from bench.summary import summarize
from bench.works import Work, calls_of

CHUNKS_PER_S_MIN = 20_000.0
ADDED_P99_MS_MAX = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    records: tuple[RequestRecord, ...]
    cpu_s: float
    steady_chunks_per_s: float  # in the middle half of the run

    @property
    def chunks(self) -> int:
        return sum(len(record.chunk_times_s) for record in self.records)


def added_s(record: RequestRecord) -> list[float]:
    """Of every token of a stamped stream: from being sent to being read."""
    found: list[float] = []
    for time_s, stamp in zip(record.chunk_times_s, record.answer.token_ids.get(0, ()), strict=True):
        late_us = (time_s * 1e6 - stamp) % STAMP_RANGE_US
        found.append((late_us if late_us < STAMP_RANGE_US / 2 else late_us - STAMP_RANGE_US) / 1e6)
    return found


async def measure(url: str, streams: int, tokens: int) -> Limits:
    """Streams start spread over a second, so that their tokens are spread too."""
    client = LoadClient(Target.parse(url))
    plain = calls_of(Work("limits", streams, 16, tokens, streams), PromptStyle("mock"), 0)
    calls = [replace(call, expect=replace(call.expect, keep=True)) for call in plain]
    await client.open_ahead(streams)
    cpu_s = time.process_time()
    try:
        with no_collection():
            records = await open_loop(client, calls, evenly(float(streams), streams))
    finally:
        client.close()
    return Limits(tuple(records), time.process_time() - cpu_s, steady_rate(records))


def steady_rate(records: list[RequestRecord]) -> float:
    """Chunks per second between the first and the third quarter of the time in which there were any."""
    times = sorted(chain.from_iterable(record.chunk_times_s for record in records))
    if not times or times[-1] == times[0]:
        return 0.0
    quarter_s = (times[-1] - times[0]) / 4
    return sum(times[0] + quarter_s <= time_s < times[0] + 3 * quarter_s for time_s in times) / (2 * quarter_s)


def report(runs: Sequence[Limits], configuration: dict[str, str]) -> Result:
    """The middle run counts; the worst is shown beside it."""
    added = [[late_s for record in run.records for late_s in added_s(record)] for run in runs]
    p99s_ms = [1e3 * (quantile(run, 0.99) or 0.0) for run in added]
    records = tuple(chain.from_iterable(run.records for run in runs))
    summary = summarize(records)
    metrics = (
        result.at_most("failed", float(summary.requests - summary.completed), 0, "requests"),
        result.plain("chunks_per_s", median(run.steady_chunks_per_s for run in runs), "chunks/s offered, steady"),
        result.plain("cpu_per_chunk", 1e6 * median(run.cpu_s / max(run.chunks, 1) for run in runs), "us"),
        result.at_least(
            "chunks_per_core_s", median(run.chunks / max(run.cpu_s, 1e-9) for run in runs), CHUNKS_PER_S_MIN, "chunks/s of a busy core"
        ),
        result.plain("added.p50", 1e3 * median(quantile(run, 0.5) or 0.0 for run in added), "ms"),
        result.at_most("added.p99", median(p99s_ms), ADDED_P99_MS_MAX, "ms, of the middle run"),
        result.plain("added.p99.worst", max(p99s_ms), "ms, of the worst run"),
    )
    return Result("client-limits", configuration, (WorkResult("limits", "against the mock worker", summary),), metrics)


def alone(pid: int, cores: list[int]) -> bool:
    """Give a process these cores, ahead of all other programs where that is allowed; whether it is."""
    os.sched_setaffinity(pid, cores)
    try:
        os.sched_setscheduler(pid, os.SCHED_FIFO, os.sched_param(10))
    except OSError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--token-ms", type=float, default=50.0)
    parser.add_argument("--repeats", type=int, default=5, help="runs; the middle one counts")
    options = parser.parse_args()
    allow(options.streams)
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "bench.mock_openai", "--token-ms", f"{options.token_ms:g}", "--stamp"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as mock:
        assert mock.stdout is not None
        try:
            address = mock.stdout.readline().split()[-1]
            ahead = alone(mock.pid, cores[:1]) and alone(0, cores[-1:])
            runs = [uvloop.run(measure(f"http://{address}", options.streams, options.tokens)) for _ in range(options.repeats)]
        finally:
            mock.terminate()
    configuration = {"streams": str(options.streams), "tokens": str(options.tokens), "token_ms": f"{options.token_ms:g}"}
    configuration |= {
        "repeats": str(options.repeats),
        "cores": "one each" if len(cores) > 1 else "one for both",
        "priority": "real-time" if ahead else "normal",
    }
    outcome = report(runs, configuration)
    result.show(outcome)
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
