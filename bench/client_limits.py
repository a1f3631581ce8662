"""What the load client itself can bear: 1,000 streams of 20 tokens/s from a mock worker with a fixed pace, in a process of its own.

Lateness of a token: how far it came behind its stream's own best, counted at the fixed pace. The mock's lateness is in it,
so the client's is less.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from bench import result
from bench.arrivals import evenly
from bench.connection import Target
from bench.load_client import LoadClient, open_loop
from bench.prompt_style import PromptStyle
from bench.quantiles import quantile
from bench.record import RequestRecord
from bench.result import ROOT, Result, WorkResult
from bench.summary import summarize
from bench.works import Work, calls_of


@dataclass(frozen=True, slots=True)
class Limits:
    records: tuple[RequestRecord, ...]
    cpu_s: float
    wall_s: float

    @property
    def chunks(self) -> int:
        return sum(len(record.chunk_times_s) for record in self.records)


def lateness_s(record: RequestRecord, pace_s: float) -> list[float]:
    """Of every token of one stream; the most punctual has 0."""
    offsets = [time_s - i * pace_s for i, time_s in enumerate(record.chunk_times_s)]
    best = min(offsets, default=0.0)
    return [offset - best for offset in offsets]


async def measure(url: str, streams: int, tokens: int) -> Limits:
    """Streams start spread over a second, so that their tokens are spread too."""
    client = LoadClient(Target.parse(url))
    calls = calls_of(Work("limits", streams, 16, tokens, streams), PromptStyle("mock"), 0)
    cpu_s, start_s = time.process_time(), time.perf_counter()
    try:
        records = await open_loop(client, calls, evenly(float(streams), streams))
    finally:
        client.close()
    return Limits(tuple(records), time.process_time() - cpu_s, time.perf_counter() - start_s)


def report(limits: Limits, pace_s: float, configuration: dict[str, str]) -> Result:
    late: Sequence[float] = [late_s for record in limits.records for late_s in lateness_s(record, pace_s)]
    p50, p99 = quantile(late, 0.5), quantile(late, 0.99)
    summary = summarize(limits.records)
    metrics = (
        result.at_most("failed", float(summary.requests - summary.completed), 0, "requests"),
        result.plain("chunks_per_s", limits.chunks / limits.wall_s, "chunks/s"),
        result.plain("cpu_per_chunk", 1e6 * limits.cpu_s / max(limits.chunks, 1), "us"),
        result.plain("chunks_per_core_s", limits.chunks / max(limits.cpu_s, 1e-9), "chunks/s of a busy core"),
        result.plain("late.p50", None if p50 is None else 1e3 * p50, "ms, the mock's included"),
        result.plain("late.p99", None if p99 is None else 1e3 * p99, "ms, the mock's included"),
    )
    return Result("client-limits", configuration, (WorkResult("limits", "against the mock worker", summary),), metrics)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--token-ms", type=float, default=50.0)
    options = parser.parse_args()
    command = [sys.executable, "-m", "bench.mock_openai", "--token-ms", f"{options.token_ms:g}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as mock:
        assert mock.stdout is not None
        try:
            address = mock.stdout.readline().split()[-1]
            limits = uvloop.run(measure(f"http://{address}", options.streams, options.tokens))
        finally:
            mock.terminate()
    configuration = {"streams": str(options.streams), "tokens": str(options.tokens), "token_ms": f"{options.token_ms:g}"}
    outcome = report(limits, options.token_ms / 1e3, configuration)
    result.show(outcome)
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
