"""The command `rantang bench`. Whatever is heavy is imported inside commands, so that help is quick."""

from __future__ import annotations

import typer

from bench.peers.cli import app as peers

app = typer.Typer(
    name="bench",
    help="Measure a server: scorecards, sweeps, comparisons.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.add_typer(peers)


@app.callback()
def bench() -> None:
    """Measure a server: scorecards, sweeps, comparisons."""


@app.command()
def metrics() -> None:
    """List the figures of a scorecard."""
    from bench.scorecard import FIGURES

    for figure in FIGURES:
        typer.echo(f"{figure.name:24} {figure.title}{', ' + figure.unit if figure.unit else ''}")


if __name__ == "__main__":
    app()
