"""The command `rantang bench`. Whatever is heavy is imported inside commands, so that help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench import analysis_cli, run_cli
from bench.each_once import EachOnce
from bench.peers.cli import app as peers
from bench.usage import end_on_sigterm, usage_errors

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def ends() -> None:
    """Measure a server: scorecards, sweeps, comparisons."""
    end_on_sigterm()


@app.command(cls=EachOnce)
def workloads(seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0) -> None:
    """List the workloads."""
    from bench.workloads import names, workload

    for name in names():
        found = workload(name, seed)
        typer.echo(f"{name:6} {found.description}; {len(found)} requests, hash {found.hash()}")


@app.command(cls=EachOnce)
def metrics() -> None:
    """List the figures of a scorecard."""
    from bench.scorecard import FIGURES

    for figure in FIGURES:
        typer.echo(f"{figure.name:24} {figure.title}{', ' + figure.unit if figure.unit else ''}")


@app.command(cls=EachOnce)
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="jsonl of requests: messages or prompt, timestamp, output length.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The trace: times, lengths, structure of prefixes; no text.")],
    *,
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Leave out lines that cannot be used, and count them.")] = False,
) -> None:
    """Make a log of requests a trace that holds no text."""
    from bench.convert import convert as convert_log

    with usage_errors():
        done = convert_log(source, target, skip_broken=skip_broken)
    typer.echo(done.description)


app.command(cls=EachOnce)(run_cli.run)
analysis_cli.add_to(app)
app.add_typer(peers)

if __name__ == "__main__":
    app()
