"""The server that is measured: one at a URL, or a stack of our own for the time of the measurement."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench import http_page, metrics_page, stack
from bench.connection import Target
from bench.point import Served
from bench.processes import Process
from bench.prompt_style import PromptStyle
from bench.result import public
from cluster import config
from cluster.flags import field_of_flag

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs. `family`: its processes, where they are known."""

    url: str
    style: PromptStyle
    served: Served = field(default_factory=Served)
    api_key: str = ""
    timeout_s: float = 600.0  # of one request
    family: Callable[[], Sequence[Process]] | None = None
    replicas_note: str = ""  # where nobody gave their number: what is counted instead


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Which server. Without `url` a stack is started with `settings` (names of `rantang serve`'s flags, with underscores).

    A setting `replicas` becomes the field of that name: what is started, what is told and what is billed are one number.
    """

    url: str | None = None
    model: str | None = None  # the server's first unless given
    api_key: str = ""
    replicas: int = 1  # at a URL: for the cost
    settings: Mapping[str, str] = field(default_factory=dict)
    text_prompts: bool = False
    ask_ids: bool = True
    chat: bool = False
    timeout_s: float = 600.0
    ask_replicas: bool = False  # at a URL: the number that the server says counts, where it says one

    def __post_init__(self) -> None:
        if self.url is not None and "://" not in self.url:
            object.__setattr__(self, "url", f"http://{self.url}")
        replicas = self.settings.get("replicas", "")
        if self.url is None and re.fullmatch("[0-9]{1,6}", replicas):  # `check` names what is no number
            object.__setattr__(self, "replicas", int(replicas))
            object.__setattr__(self, "settings", {name: value for name, value in self.settings.items() if name != "replicas"})


def check(options: ServerOptions) -> None:
    """Raises ValueError for options that make no server."""
    if options.replicas < 1:
        raise ValueError(f"--replicas: a server has at least one, got {options.replicas}")
    if not 0 < options.timeout_s < float("inf"):
        raise ValueError(f"--timeout-s: a request has some time, got {options.timeout_s:g}")
    if not options.api_key.isprintable():
        raise ValueError("an API key is one line of printable text")
    if options.url is None:
        serve_arguments(options)
        return
    if options.settings:
        raise ValueError("a server that runs already cannot be given settings; leave --url out to have one started")
    try:
        Target.parse(options.url)
    except ValueError as error:
        raise ValueError(f"--url: {error}") from error


@contextlib.contextmanager
def open_server(options: ServerOptions) -> Iterator[Server]:
    """Of options that pass `check`. Raises StackError when the stack does not start, or nothing answers at the URL."""
    if options.url is not None:
        url = options.url.rstrip("/").removesuffix("/v1")
        try:  # whatever it says: a measurement of nothing would only count errors, one time limit after another
            http_page.fetch(f"{url}/v1/models", CONNECT_TIMEOUT_S, api_key=options.api_key)
        except OSError as error:
            raise stack.StackError(f"nothing answers at {url}: {error}") from None
        _check_ready(url, options.api_key)
        yield _counted(_describe(options, url)) if options.ask_replicas else _describe(options, url)
        return
    arguments = serve_arguments(options)
    running = stack.start(arguments)
    try:
        server = _describe(options, running.url)
        command = shlex.join(["rantang", "serve", *(public(argument) for argument in arguments)])
        settings = {name: public(value) for name, value in options.settings.items()}
        served = Served("rantang", _own_version(), command, settings, options.replicas)
        yield Server(server.url, server.style, served, "", options.timeout_s, running.processes)
    finally:
        running.stop()


def _check_ready(url: str, api_key: str) -> None:
    """Raises StackError for a server that says itself that it would refuse: a start is no load. One without /ready says nothing."""
    with contextlib.suppress(OSError):
        if http_page.fetch(f"{url}/ready", CONNECT_TIMEOUT_S, api_key=api_key).status == 503:
            raise stack.StackError(f"the server at {url} is not ready yet: /ready answers 503")


def serve_arguments(options: ServerOptions) -> list[str]:
    """Flags of `rantang serve`. Raises ValueError for a setting that does not exist, or a value that it cannot have."""
    given: dict[str, dict[str, Any]] = {section: {} for section in config.SECTIONS}
    arguments: list[str] = []
    flags = field_of_flag()
    if "replicas" in options.settings:
        raise ValueError(f"replicas must be a number, got {options.settings['replicas']!r}")
    for name, value in {"replicas": str(options.replicas), **options.settings}.items():
        if name not in flags:
            raise ValueError(f"unknown setting {name!r}; there are {', '.join(flags)}")
        section, key = flags[name]
        given[section][key] = value
        flag = name.replace("_", "-")
        if config.SECTIONS[section].model_fields[key].annotation is bool:
            arguments.append(f"--{flag}" if value.lower() in ("true", "1", "yes", "on") else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", value]
    try:
        config.load(None, given)
    except config.ConfigError as error:
        raise ValueError("; ".join(error.lines)) from error
    return arguments


def setting_of(text: str) -> tuple[str, str]:
    """`name=value`. Raises ValueError for anything else."""
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ValueError(f"{text!r} is no NAME=VALUE")
    return name.strip().lstrip("-").replace("-", "_"), value.strip()


def _describe(options: ServerOptions, url: str) -> Server:
    first = first_model(url, options.api_key)
    style = PromptStyle(options.model or str(first.get("id", "default")), options.text_prompts, options.ask_ids, options.chat)
    version = _json(f"{url}/version", options.api_key).get("version")
    served = Served(str(first.get("owned_by", "unknown")), str(version or ""), "a running server", {}, options.replicas)
    return Server(url, style, served, options.api_key, options.timeout_s)


def _counted(server: Server) -> Server:
    """With the replicas that its /metrics says are connected, or a note that it does not say."""
    try:
        page = metrics_page.parse(stack.get_text(f"{server.url}/metrics", api_key=server.api_key))
    except (OSError, ValueError):
        page = None
    count = page.values.get(metrics_page.REPLICAS, 0.0) if page else 0.0
    if not count >= 1:
        assumed = f"the server does not say how many replicas it has: the cost is that of {server.served.replicas} (--replicas)"
        return replace(server, replicas_note=assumed)
    note = f"the server says that it has {count:g} replica{'s' * (count != 1)}: so many are paid"
    return replace(server, served=replace(server.served, replicas=int(count)), replicas_note=note)


def first_model(url: str, api_key: str = "") -> dict[str, Any]:
    """Of /v1/models; empty when there is none. `url` without /v1."""
    models = _json(f"{url}/v1/models", api_key).get("data")
    return models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}


def _json(url: str, api_key: str) -> dict[str, Any]:
    """Empty when the server has no such page."""
    try:
        found = json.loads(stack.get_text(url, api_key=api_key))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _own_version() -> str:
    try:
        return importlib.metadata.version("rantang")
    except importlib.metadata.PackageNotFoundError:
        return ""
