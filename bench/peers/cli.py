"""`rantang bench peers`: the comparison, and how peers are installed and started. Heavy imports stand inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.each_once import EachOnce, EachOnceGroup
from bench.usage import end_on_sigterm

app = typer.Typer(
    name="peers",
    cls=EachOnceGroup,
    help="Compare with other servers, side by side in one run.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PeersDir = Annotated[Path, typer.Option("--peers-dir", help="where peers are installed")]
PEERS_DIR = Path("~/.cache/rantang/peers")
GOLDEN = "tests/end_to_end/golden_small.json"


@app.callback(invoke_without_command=True)
def compare(
    context: typer.Context,
    *,
    peers: Annotated[str, typer.Option(help="names (see `list`) or URLs, with commas")] = "vllm,vllm-default,llama.cpp,llama.cpp-gguf",
    works: Annotated[str, typer.Option(help="which works, by letter")] = "a,b,c,d,e",
    requests: Annotated[str, typer.Option(help="other numbers of requests, e.g. a=2,c=32")] = "",
    ours: Annotated[
        list[str] | None,
        typer.Option(help="LABEL=ARGUMENTS of `rantang serve`, NAME=VALUE before them for its environment; may be given several times"),
    ] = None,
    golden: Annotated[str, typer.Option(help="recorded greedy outputs that every server must say; empty: not checked")] = GOLDEN,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="folder of the results; bench/results unless given")] = None,
    peers_dir: PeersDir = PEERS_DIR,
) -> None:
    """The same works against ours, each peer, and ours again; a table, JSON and Markdown."""
    if context.invoked_subcommand is not None:
        return
    from bench.peers import main
    from bench.result import RESULTS

    end_on_sigterm()
    names = tuple(name.strip() for name in peers.split(",") if name.strip())
    request = main.Request(names, works, requests, tuple(ours or ("rantang=",)), golden, seed, out or RESULTS)
    raise typer.Exit(main.compare(request, peers_dir.expanduser()))


@app.command(cls=EachOnce)
def install(name: str, peers_dir: PeersDir = PEERS_DIR) -> None:
    """Fetch or build one peer into an environment of its own, and the models it serves."""
    from bench.peers import main

    raise typer.Exit(main.install(name, peers_dir.expanduser()))


@app.command(cls=EachOnce)
def start(
    name: str, workers: Annotated[str, typer.Option(help="for routers: base URLs, with commas")] = "", peers_dir: PeersDir = PEERS_DIR
) -> None:
    """Start one peer on a free port and print its URL; it runs until Ctrl-C. A router without workers gets two mock ones."""
    from bench.peers import main

    end_on_sigterm()
    raise typer.Exit(main.start(name, tuple(url for url in workers.split(",") if url), peers_dir.expanduser()))


@app.command("list", cls=EachOnce)
def list_peers(peers_dir: PeersDir = PEERS_DIR) -> None:
    """What there is, which version, and what is missing."""
    from bench.peers import main

    raise typer.Exit(main.list_peers(peers_dir.expanduser()))


if __name__ == "__main__":
    app()
