"""The command `rantang bench run`. Whatever is heavy is imported inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.analysis_cli import (
    ApiKey,
    ContextTokens,
    LengthScale,
    MaxHours,
    Model,
    NoIds,
    Price,
    Repeats,
    Replicas,
    Requests,
    Seed,
    Settings,
    TextPrompts,
    TimeoutS,
    Url,
)
from bench.hours import HOURS_MAX
from bench.usage import usage_errors

Names = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        "-w",
        show_default="chat",
        help="Names or trace files, separated by commas or given again, each with @RATE or not; see `workloads`.",
    ),
]
Rate = Annotated[float | None, typer.Option(help="Open loop: requests per second.")]
Streams = Annotated[int | None, typer.Option(help="Closed loop: so many clients, each sending when its last answer ended.")]
ArrivalsName = Annotated[str, typer.Option(help="workload (its own pattern), poisson, gamma, even; with --rate.")]
Burstiness = Annotated[float, typer.Option(help="Shape of gamma arrivals; below 1 they come in bursts.")]
Speed = Annotated[float, typer.Option(help="The workload's own times, so many times as fast.")]
DurationS = Annotated[float | None, typer.Option(help="Of arrivals at a rate, instead of a number of requests.")]
SloOfAll = Annotated[str, typer.Option("--slo", help="All targets at once, as of `sweep`: ttft_ms=2000,itl_p95_ms=200.")]
TtftMs = Annotated[float | None, typer.Option(help="A response is accepted when its first token came so soon,")]
ItlMs = Annotated[float | None, typer.Option(help="95 % of its gaps between tokens were no longer,")]
TpotMs = Annotated[float | None, typer.Option(help="its mean time per token was no longer,")]
E2eMs = Annotated[float | None, typer.Option(help="and it ended so soon.")]
QueueMs = Annotated[float | None, typer.Option(help="p95 of queue time by the server's own metrics.")]
Changes = Annotated[
    list[str] | None, typer.Option("--change", metavar="NAME=VALUE", help="One control, measured alone beside the baseline.")
]
Controls = Annotated[bool, typer.Option("--controls", help="Change the token budget and the limit of sequences, one at a time.")]
Obey = Annotated[bool, typer.Option("--obey-retry-after", help="Send a refused request again when the server says.")]
Fresh = Annotated[bool, typer.Option("--new-connections", help="One for every request.")]
Chat = Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions.")]
Salt = Annotated[str, typer.Option(help="Fixes the text of prompts; drawn unless given, so that no run finds another's prefixes.")]
Report = Annotated[bool, typer.Option("--report", help="Plots and one HTML page too; needs matplotlib.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the result; bench/results unless given.")]


def run(
    *,
    workloads: Names = None,
    rate: Rate = None,
    streams: Streams = None,
    arrivals: ArrivalsName = "workload",
    burstiness: Burstiness = 1.0,
    speed: Speed = 1.0,
    requests: Requests = None,
    duration_s: DurationS = None,
    seed: Seed = 0,
    length_scale: LengthScale = 1.0,
    context_tokens: ContextTokens = 8192,
    repeats: Repeats = 1,
    slo_text: SloOfAll = "",
    slo_ttft_ms: TtftMs = None,
    slo_itl_p95_ms: ItlMs = None,
    slo_tpot_ms: TpotMs = None,
    slo_e2e_ms: E2eMs = None,
    slo_queue_ms: QueueMs = None,
    price_per_hour: Price = None,
    url: Url = None,
    model: Model = None,
    api_key: ApiKey = "",
    replicas: Replicas = None,
    settings: Settings = None,
    changes: Changes = None,
    controls: Controls = False,
    obey_retry_after: Obey = False,
    new_connections: Fresh = False,
    text_prompts: TextPrompts = False,
    no_ids: NoIds = False,
    chat: Chat = False,
    timeout_s: TimeoutS = 600.0,
    salt: Salt = "",
    max_hours: MaxHours = HOURS_MAX,
    report: Report = False,
    out: Out = None,
) -> None:
    """Measure a workload at a load: a scorecard, as a table, JSON, Markdown and CSV."""
    from bench import run_command as command
    from bench.analysis.slo_text import parse_slo
    from bench.load import Arrivals, Load
    from bench.out_folder import check_folder
    from bench.result import RESULTS
    from bench.server import ServerOptions, setting_of
    from bench.slo import Slo
    from bench.traces import Fit

    with usage_errors():
        given = dict(setting_of(text) for text in settings or ())
        count = 1 if replicas is None else replicas
        server = ServerOptions(url, model, api_key, count, given, text_prompts, not no_ids, chat, timeout_s, replicas is None)
        load = Load(streams, rate, Arrivals(arrivals), burstiness, speed, obey_retry_after, new_connections)
        slo = Slo(slo_ttft_ms, slo_itl_p95_ms, slo_tpot_ms, slo_e2e_ms, slo_queue_ms)
        if slo_text:
            if slo != Slo():
                raise ValueError("--slo gives all targets: leave the single ones out")
            slo = parse_slo(slo_text)
        names = [name for given_names in workloads or ["chat"] for name in map(str.strip, given_names.split(",")) if name]
        fit = Fit(length_scale, context_tokens)
        tried = [*(changes or ()), *(command.CONTROLS if controls else ())]
        folder = out or RESULTS
        options = command.RunOptions(
            names, server, load, slo, seed, requests, duration_s, fit, repeats, price_per_hour, tried, folder, salt, report, max_hours
        )
        planned = command.plan(options)
        check_folder(folder)
    raise typer.Exit(command.run(planned))
