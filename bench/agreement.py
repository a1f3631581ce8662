"""Does our load client see what an independent one sees? `vllm bench serve` and ours, turn by turn, against the fixed-timing mock.

The same load for both, and medians of the runs of each are compared. In a closed loop the fixed timing keeps all streams in
step, and a client's TTFT then holds the time it takes to send that many requests at once; `--rate` spaces requests evenly.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop

from bench import result
from bench.arrivals import evenly
from bench.connection import Target
from bench.load_client import LoadClient, closed_loop, open_loop
from bench.peers.home import DEFAULT, Home, PeerError
from bench.peers.vllm import FOLDER, Vllm
from bench.prompt_style import PromptStyle
from bench.result import ROOT, Metric, Result
from bench.summary import summarize
from bench.works import Work, calls_of

BOUND_PERCENT = 3.0
RUN_TIMEOUT_S = 180.0
EVEN_BURSTINESS = 1_000_000  # the shape of their gamma intervals: so large that all are equal
FIGURES = ("ttft_ms", "itl_ms", "output_tokens_per_s")


@dataclass(frozen=True, slots=True)
class Load:
    """`rate_per_s`: an open loop of evenly spaced requests; None: a closed loop of the work's streams."""

    work: Work
    rate_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What one client reports of one run: medians, and output tokens/s from the first request to the last answer."""

    ttft_ms: float
    itl_ms: float
    output_tokens_per_s: float
    completed: int


async def ours(url: str, load: Load) -> Seen:
    client = LoadClient(Target.parse(url))
    calls = calls_of(load.work, PromptStyle("mock"), 0)
    try:
        if load.rate_per_s is None:
            records = await closed_loop(client, calls, streams=load.work.streams)
        else:
            records = await open_loop(client, calls, evenly(load.rate_per_s, len(calls)))
    finally:
        client.close()
    summary = summarize(records)
    latencies = summary.latencies
    assert latencies.ttft_ms.p50 is not None and latencies.itl_ms.p50 is not None, summary.problems
    return Seen(latencies.ttft_ms.p50, latencies.itl_ms.p50, summary.output_tokens_per_s, summary.completed)


def theirs_command(home: Home, url: str, load: Load, file: Path) -> list[str]:
    work = load.work
    settings = {
        "--backend": "openai",
        "--base-url": url,
        "--endpoint": "/v1/completions",
        "--model": "mock",
        "--tokenizer": str(home.checkpoint),
        "--dataset-name": "random",
        "--random-input-len": str(work.prompt_tokens),
        "--random-output-len": str(work.output_tokens),
        "--num-prompts": str(work.requests),
        "--percentile-metrics": "ttft,itl",
        "--result-dir": str(file.parent),
        "--result-filename": file.name,
    }
    if load.rate_per_s is None:
        settings["--max-concurrency"] = str(work.streams)
    else:
        settings |= {"--request-rate": f"{load.rate_per_s:g}", "--burstiness": f"{EVEN_BURSTINESS}"}
    flat = [part for pair in settings.items() for part in pair]
    return [str(home.executable(FOLDER, "vllm")), "bench", "serve", *flat, "--ignore-eos", "--disable-tqdm", "--save-result"]


def theirs(home: Home, url: str, load: Load) -> Seen:
    """Raises PeerError."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        command = theirs_command(home, url, load, file)
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
        if done.returncode or not file.is_file():
            raise PeerError(f"vllm bench serve: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return read_theirs(json.loads(file.read_bytes()))


def read_theirs(report: dict[str, float]) -> Seen:
    """Their result file. Raises KeyError where it lacks a figure."""
    return Seen(report["median_ttft_ms"], report["median_itl_ms"], report["output_throughput"], int(report["completed"]))


def metrics_of(own: Sequence[Seen], other: Sequence[Seen], work: Work) -> tuple[Metric, ...]:
    """Differences of medians, in percent of theirs."""
    metrics: list[Metric] = []
    for figure in FIGURES:
        mine, others = (median(float(getattr(seen, figure)) for seen in runs) for runs in (own, other))
        metrics.append(result.at_most(f"difference.{figure}", 100 * abs(mine - others) / others, BOUND_PERCENT, "%"))
        metrics.append(result.plain(f"ours.{figure}", mine, "median of runs"))
        metrics.append(result.plain(f"theirs.{figure}", others, "median of runs"))
    lost = sum(work.requests - seen.completed for seen in [*own, *other])
    metrics.append(result.at_most("lost", float(lost), 0, "requests of either client"))
    return tuple(metrics)


def compare(home: Home, load: Load, runs: int, mock: Sequence[str]) -> Result:
    """Raises PeerError."""
    own: list[Seen] = []
    other: list[Seen] = []
    with subprocess.Popen(mock, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        try:
            url = f"http://{server.stdout.readline().split()[-1]}"
            for turn in range(runs):
                other.append(theirs(home, url, load))
                own.append(uvloop.run(ours(url, load)))
                print(f"run {turn + 1}: theirs {other[-1]}\n       ours   {own[-1]}", flush=True)
        finally:
            server.terminate()
    command = home.public(" ".join(theirs_command(home, "http://127.0.0.1:PORT", load, Path("DIR/run.json"))))
    configuration = {"theirs": Vllm().version(home), "their_command": command, "mock": " ".join(["python", *mock[1:]]), "runs": str(runs)}
    configuration["load"] = load.work.description if load.rate_per_s is None else f"{load.rate_per_s:g} req/s, evenly spaced"
    details = {"ours": own, "theirs": other, "requests": load.work.requests}
    return Result("agreement", configuration, metrics=metrics_of(own, other, load.work), details=details)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each client")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rate", type=float, help="requests per second, evenly spaced; else a closed loop of --streams")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--first-ms", type=float, default=100.0)
    parser.add_argument("--token-ms", type=float, default=20.0)
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT, help="where vLLM is installed")
    options = parser.parse_args()
    home = Home(options.peers_dir.expanduser())
    why = Vllm().missing(home)
    if why:
        print(why)
        return 2
    pace = ["--first-ms", f"{options.first_ms:g}", "--token-ms", f"{options.token_ms:g}"]
    work = Work("agreement", options.streams, 128, options.output_tokens, options.requests)
    try:
        outcome = compare(home, Load(work, options.rate), options.runs, [sys.executable, "-m", "bench.mock_openai", *pace])
    except (PeerError, subprocess.TimeoutExpired) as error:
        print(error)
        return 1
    result.show(outcome)
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
