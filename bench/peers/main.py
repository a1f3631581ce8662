"""What the commands of `rantang bench peers` do. Each returns its exit code."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markdown import Markdown

from bench import golden, result
from bench.connection import Target
from bench.console import new_console
from bench.golden import Golden
from bench.out_folder import check_folder, writing
from bench.peers import comparison, contestant, same_model
from bench.peers.comparison import Column
from bench.peers.contestant import Contestant
from bench.peers.home import Home, PeerError
from bench.peers.peer import Prompts
from bench.peers.registry import peer, peers
from bench.peers.routers import PublicRouter
from bench.peers.same_model import SameModel
from bench.peers.table import markdown_of
from bench.peers.work_runs import chosen_works, measure, with_requests
from bench.report_command import report_too
from bench.result import RESULTS, ROOT, WorkResult
from bench.run_command import tell_paths
from bench.server import first_model
from bench.works import Work, workload_of
from replica.contract.gguf_header import read_gguf_header
from replica.contract.model_error import ModelError
from router.text.tokenizer_files import tokenizer_from_gguf


@dataclass(frozen=True, slots=True)
class Request:
    """A comparison as it was asked for. `ours`: LABEL=ARGUMENTS each. `golden`: a file, "" for none."""

    peers: tuple[str, ...]
    works: str
    requests: str
    ours: tuple[str, ...]
    golden: str
    seed: int
    out: Path = RESULTS


@dataclass(frozen=True, slots=True)
class Asked:
    """What was checked of it. `labels`: of ours."""

    works: tuple[Work, ...]
    labels: tuple[str, ...]
    request: Request


def compare(request: Request, folder: Path) -> int:
    """0: every bound holds, and something was compared. What was finished when a signal ended it is written; its exception goes on."""
    console = new_console()
    home = Home(folder)
    try:
        works = with_requests(chosen_works(request.works), request.requests)
        own = [ours_of(text) for text in request.ours]
        check_folder(request.out)
        others = [contestant_of(name, home) for name in request.peers]
        comparison.check_names(own, others)
        reference = golden.load(ROOT / request.golden) if request.golden else None
        if any("://" not in name for name in request.peers):
            home.make_models()
    except (ValueError, OSError, msgspec.MsgspecError, ModelError) as error:
        console.print(str(error), style="red")
        return 2

    async def measure_one(one: Contestant, url: str) -> tuple[WorkResult, ...]:
        return await measure(url, works, one.prompts, request.seed)

    asked = Asked(tuple(works), tuple(one.name for one in own), request)
    columns: list[Column] = []
    try:
        columns.extend(comparison.compare(own, others, measure_one, check_of(reference, home), console.print))
    except (KeyboardInterrupt, SystemExit):
        if any(column.works for column in columns):
            console.print(f"interrupted: {len(columns)} servers are finished, and kept", style="red")
            tell(asked, columns, console)
        raise
    return 0 if tell(asked, columns, console) else 1


def tell(asked: Asked, columns: Sequence[Column], console: Console) -> bool:
    """Write and print what was measured; whether every bound holds, and something was compared."""
    works, labels = asked.works, asked.labels
    counts = ",".join(f"{work.name}={work.requests}" for work in works)
    seed = asked.request.seed
    hashes = ",".join(f"{work.name}={workload_of(work, seed).hash()}" for work in works)
    names = ",".join(work.name for work in works)
    configuration = {"works": names, "requests": counts, "hashes": hashes, "repeats": "1", "seed": str(seed)}
    outcome = comparison.result_of(columns, labels, works, configuration)
    markdown = markdown_of(columns, labels, works)
    console.print(Markdown(markdown))
    with writing(asked.request.out):
        path = result.write(outcome, asked.request.out)
        path.with_suffix(".md").write_text(markdown)
    tell_paths([path, path.with_suffix(".md")], console)
    tell_paths(report_too(path, console), console)
    return outcome.holds and any(column.works for column in columns if column.name not in labels)


def check_of(reference: Golden | None, home: Home) -> comparison.Check:
    """Compares greedy texts, where there is a reference and the server takes ids."""
    decode: Callable[[Sequence[int]], str] = tokenizer_from_gguf(read_gguf_header(home.gguf).metadata).decode

    async def check(one: Contestant, url: str) -> SameModel | None:
        if reference is None or one.prompts.as_text:
            return None
        return await same_model.check(url, reference, one.prompts, decode)

    return check


def ours_of(text: str) -> Contestant:
    """LABEL=ARGUMENTS. Raises ValueError."""
    label, equals, arguments = text.partition("=")
    if not equals or not label or label.startswith("-"):
        raise ValueError(f"ours must be LABEL=ARGUMENTS of `rantang serve`, got {text!r}")
    return contestant.ours(label.strip(), arguments)


def contestant_of(name: str, home: Home) -> Contestant:
    """A peer by its name, or whoever listens at an URL. Raises ValueError for what is neither."""
    if "://" in name:
        Target.parse(name)
        model = first_model(name.rstrip("/").removesuffix("/v1")).get("id")
        return contestant.of_url(name, Prompts(str(model) if model else Prompts().model, ask_ids=False))
    return contestant.of_peer(peer(name, home), home)


def install(name: str, folder: Path) -> int:
    home = Home(folder)
    try:
        chosen = peer(name, home)
        home.folder(name).parent.mkdir(parents=True, exist_ok=True)
        home.make_models()
        chosen.install(home)
    except (ValueError, PeerError, ModelError) as error:
        print(error)
        return 1
    print(f"{name}: {chosen.version(home)}")
    return 0


def list_peers(folder: Path) -> int:
    home = Home(folder)
    for name, one in peers(home).items():
        why = one.missing(home)
        print(f"{name:16} {why or one.version(home)}")
    return 0


def start(name: str, workers: tuple[str, ...], folder: Path) -> int:
    home = Home(folder)
    try:
        with contextlib.ExitStack() as held:
            if isinstance(peer(name, home), PublicRouter) and not workers:
                workers = tuple(held.enter_context(mock_worker()) for _ in range(2))
            running = held.enter_context(contestant.of_peer(peer(name, home, workers), home).run())
            print(f"{running.version}\n{running.command}\nserving at {running.url}; Ctrl-C ends it", flush=True)
            signal.pause()
    except KeyboardInterrupt:
        return 0
    except (ValueError, PeerError, ModelError) as error:
        print(error)
        return 1
    return 0


@contextlib.contextmanager
def mock_worker() -> Iterator[str]:
    """The URL of an OpenAI server without a model."""
    command = [sys.executable, "-m", "bench.mock_openai", "--token-ms", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as mock:
        assert mock.stdout is not None
        try:
            yield f"http://{mock.stdout.readline().split()[-1]}"
        finally:
            mock.terminate()
