"""One column of the comparison: ours, a peer, or a URL – how it is asked, and how it comes to run for a while."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from bench import result, stack
from bench.peers.home import Home, PeerError
from bench.peers.peer import Peer, Prompts
from bench.stack import Stack, StackError


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers now. `stack` is None when it is not ours to stop or to look into."""

    url: str
    version: str
    command: str
    notes: tuple[str, ...] = ()
    stack: Stack | None = None


@dataclass(frozen=True, slots=True)
class Contestant:
    """`run` starts it and stops it with all its children; it raises PeerError where it does not start."""

    name: str
    prompts: Prompts
    run: Callable[[], AbstractContextManager[Running]]


_SETTING = re.compile(r"[A-Z][A-Z0-9_]*=")


def ours(label: str, arguments: str) -> Contestant:
    """The whole stack with one replica: `rantang serve --replicas 1 ARGUMENTS`. NAME=VALUE before them goes to its environment."""
    words = shlex.split(arguments)
    settings = list(itertools.takewhile(_SETTING.match, words))
    given = ["--replicas", "1", *words[len(settings) :]]
    environment = dict(setting.split("=", 1) for setting in settings)

    @contextlib.contextmanager
    def run() -> Iterator[Running]:
        with _stopped(lambda: stack.start(given, environment=environment)) as served:
            version = f"rantang {importlib.metadata.version('rantang')} ({result.commit()})"
            yield Running(served.url, version, shlex.join([*settings, "rantang", "serve", *given]), stack=served)

    return Contestant(label, Prompts(), run)


def of_peer(peer: Peer, home: Home) -> Contestant:
    @contextlib.contextmanager
    def run() -> Iterator[Running]:
        why = peer.missing(home)
        if why:
            raise PeerError(why)
        port = stack.free_port()
        launch = peer.launch(home, port)
        command = launch.command(home)

        def spawn() -> Stack:
            return stack.spawn(
                launch.argv,
                port,
                ready_path=peer.ready_path,
                environment=launch.environment,
                timeout_s=peer.start_timeout_s,
                title=peer.name,
            )

        version = peer.version(home)
        with _stopped(spawn) as served:
            yield Running(served.url, version, command, launch.notes, served)

    return Contestant(peer.name, peer.prompts, run)


def of_url(url: str, prompts: Prompts) -> Contestant:
    """Whoever runs it knows what it is."""

    @contextlib.contextmanager
    def run() -> Iterator[Running]:
        yield Running(url, "not known", result.public(url))

    return Contestant(result.public(url), prompts, run)


@contextlib.contextmanager
def _stopped(start: Callable[[], Stack]) -> Iterator[Stack]:
    try:
        served = start()
    except (OSError, StackError) as error:
        raise PeerError(str(error)) from error
    try:
        yield served
    finally:
        served.stop()
