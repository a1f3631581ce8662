"""The command `rantang`. Ray and torch are imported inside commands only, so that help is quick."""

from __future__ import annotations

from cluster import early_exit  # noqa: F401 – first: it is for the time that the others take

# isort: split
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.commands import CommandsOfOthers
from cluster.flags import with_config_flags

EXIT_USAGE = 2
# typer brings its own copy of click and shows of its errors only BadParameter; their common base is what we catch.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

cli = typer.Typer(
    name="rantang",
    cls=CommandsOfOthers,
    help="Serve language models on a cluster: prefix-aware routing, continuous batching, paged KV.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: tables of rich cut the names of flags off at 80 columns
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@cli.command()
@with_config_flags
def serve(
    model_path: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="'smollm2', a directory, a .gguf file or a Hugging Face id.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="YAML with the sections engine, router, serve; flags win.")
    ] = None,
    flags: dict[str, dict[str, Any]] = {},  # noqa: B006 – replaced by one option per field of the configuration
) -> None:
    """Serve a model over the OpenAI API until Ctrl-C."""
    from cluster.config import load
    from cluster.foreground import run_apart
    from cluster.serve_command import run

    if model_path is not None:
        if "model" in flags["engine"] and flags["engine"]["model"] != model_path:
            raise typer.BadParameter("the model is given twice, as an argument and by --model")
        flags["engine"]["model"] = model_path
    wanted = load(config, flags)
    raise typer.Exit(run_apart(lambda: run(wanted)))


@cli.command()
@with_config_flags
def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="YAML with the sections engine, router, serve; flags win.")
    ] = None,
    flags: dict[str, dict[str, Any]] = {},  # noqa: B006 – replaced by one option per field of the configuration
) -> None:
    """Check that a replica's ranks find their devices and one another, and how fast they add up; loads no model."""
    from cluster.config import load
    from cluster.doctor_command import run
    from cluster.foreground import run_apart

    wanted = load(config, flags)
    raise typer.Exit(run_apart(lambda: run(wanted)))


@cli.command()
def chat(
    url: Annotated[str, typer.Option(help="An OpenAI-compatible server; with or without /v1.")] = "http://127.0.0.1:8000",
    message: Annotated[str | None, typer.Option("--message", "-m", help="Ask this, print the answer, leave.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask for; the server's first unless given.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; the server's default unless given.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer in tokens.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar=["RANTANG_API_KEY", "OPENAI_API_KEY"], help="Bearer token.")] = None,
) -> None:
    """Talk to a server from the terminal."""
    from cluster.chat import Options, run

    options = Options(url=url, model=model, system=system, temperature=temperature, max_tokens=max_tokens, api_key=api_key)
    raise typer.Exit(run(options, message))


@cli.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"rantang {_version()}")


def main() -> None:
    """The console script. Every error of the user is one line on stderr, and a status that is not 0."""
    from cluster.config import ConfigError

    try:
        status = cli(standalone_mode=False)
    except ConfigError as error:
        for line in error.lines:
            _complain(line)
        status = EXIT_USAGE
    except _UsageError as error:
        _complain(error.format_message() if hasattr(error, "format_message") else str(error))
        status = EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except BrokenPipeError:  # the reader of our output is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status if isinstance(status, int) else 0)


def _complain(line: str) -> None:
    typer.echo("rantang: " + " ".join(line.split()), err=True)


def _version() -> str:
    try:
        return importlib.metadata.version("rantang")
    except importlib.metadata.PackageNotFoundError:
        return "0 (not installed)"


if __name__ == "__main__":
    main()
