"""The command `rantang bench`. Whatever is heavy is imported inside commands, so that help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench import analysis_cli
from bench.usage import usage_errors

app = typer.Typer(
    name="bench",
    help="Measure a server: scorecards, sweeps, comparisons.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def run(
    *,
    workloads: Annotated[
        str, typer.Option("--workload", "-w", help="Names or trace files, separated by commas, each with @RATE or not; see `workloads`.")
    ] = "chat",
    rate: Annotated[float | None, typer.Option(help="Open loop: requests per second.")] = None,
    streams: Annotated[int | None, typer.Option(help="Closed loop: so many clients, each sending when its last answer ended.")] = None,
    arrivals: Annotated[str, typer.Option(help="workload (its own pattern), poisson, gamma, even; with --rate.")] = "workload",
    burstiness: Annotated[float, typer.Option(help="Shape of gamma arrivals; below 1 they come in bursts.")] = 1.0,
    speed: Annotated[float, typer.Option(help="The workload's own times, so many times as fast.")] = 1.0,
    requests: Annotated[int | None, typer.Option(help="How many; of a trace, its first.")] = None,
    duration_s: Annotated[float | None, typer.Option(help="Of arrivals at a rate, instead of a number.")] = None,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0,
    length_scale: Annotated[float, typer.Option(help="Of a trace's lengths.")] = 1.0,
    context_tokens: Annotated[int, typer.Option(help="Longer requests of a trace are cut to it.")] = 8192,
    repeats: Annotated[int, typer.Option(help="Runs, each with text of its own.")] = 1,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="A response is accepted when its first token came so soon,")] = None,
    slo_itl_p95_ms: Annotated[float | None, typer.Option(help="95 % of its gaps between tokens were no longer,")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="its mean time per token was no longer,")] = None,
    slo_e2e_ms: Annotated[float | None, typer.Option(help="and it ended so soon.")] = None,
    slo_queue_ms: Annotated[float | None, typer.Option(help="p95 of queue time by the server's own metrics.")] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="Of one replica, for the cost per accepted response.")] = None,
    url: Annotated[str | None, typer.Option(help="A running OpenAI-compatible server; without it a stack is started.")] = None,
    model: Annotated[str | None, typer.Option(help="Name to ask for; the server's first unless given.")] = None,
    api_key: Annotated[str, typer.Option(envvar=["RANTANG_API_KEY", "OPENAI_API_KEY"], help="Bearer token.")] = "",
    replicas: Annotated[int, typer.Option(help="Of the stack that is started; at a URL, for the cost.")] = 1,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of every stack.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--change", metavar="NAME=VALUE", help="One control, measured alone beside the baseline.")
    ] = None,
    controls: Annotated[
        bool, typer.Option("--controls", help="Change the token budget and the limit of sequences, one at a time.")
    ] = False,
    obey_retry_after: Annotated[
        bool, typer.Option("--obey-retry-after", help="Send a refused request again when the server says.")
    ] = False,
    new_connections: Annotated[bool, typer.Option("--new-connections", help="One for every request.")] = False,
    text_prompts: Annotated[bool, typer.Option("--text-prompts", help="For servers that take no token ids.")] = False,
    no_ids: Annotated[bool, typer.Option("--no-ids", help="Do not ask for token ids in the answer.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions.")] = False,
    timeout_s: Annotated[float, typer.Option(help="Of one request.")] = 600.0,
    salt: Annotated[str, typer.Option(help="Fixes the text of prompts; drawn unless given, so that no run finds another's prefixes.")] = "",
    report: Annotated[bool, typer.Option("--report", help="Plots and one HTML page too; needs matplotlib.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the result; bench/results unless given.")] = None,
) -> None:
    """Measure a workload at a load: a scorecard, as a table, JSON, Markdown and CSV."""
    from bench import run_command
    from bench.load import Arrivals, Load
    from bench.result import RESULTS
    from bench.server import ServerOptions, setting_of
    from bench.slo import Slo
    from bench.traces import Fit

    with usage_errors():
        server = ServerOptions(
            url,
            model,
            api_key,
            replicas,
            dict(setting_of(text) for text in settings or ()),
            text_prompts,
            not no_ids,
            chat,
            timeout_s,
        )
        load = Load(streams, rate, Arrivals(arrivals), burstiness, speed, obey_retry_after, new_connections)
        options = run_command.RunOptions(
            [name for name in workloads.split(",") if name],
            server,
            load,
            Slo(slo_ttft_ms, slo_itl_p95_ms, slo_tpot_ms, slo_e2e_ms, slo_queue_ms),
            seed,
            requests,
            duration_s,
            Fit(length_scale, context_tokens),
            repeats,
            price_per_hour,
            [*(changes or ()), *(run_command.CONTROLS if controls else ())],
            out or RESULTS,
            salt,
            report,
        )
        planned = run_command.plan(options)
    raise typer.Exit(run_command.run(planned))


@app.command()
def workloads(seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0) -> None:
    """List the workloads."""
    from bench.workloads import names, workload

    for name in names():
        found = workload(name, seed)
        typer.echo(f"{name:6} {found.description}; {len(found)} requests, hash {found.hash()}")


@app.command()
def metrics() -> None:
    """List the figures of a scorecard."""
    from bench.scorecard import FIGURES

    for figure in FIGURES:
        typer.echo(f"{figure.name:24} {figure.title}{', ' + figure.unit if figure.unit else ''}")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="jsonl of requests: messages or prompt, timestamp, output length.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The trace: times, lengths, structure of prefixes; no text.")],
) -> None:
    """Make a log of requests a trace that holds no text."""
    from bench.convert import convert as convert_log

    with usage_errors():
        done = convert_log(source, target)
    estimated = f"; the lengths of {done.estimated} prompts are estimates" if done.estimated else ""
    typer.echo(f"{done.requests} requests{estimated}")


analysis_cli.add_to(app)

if __name__ == "__main__":
    app()
