"""What a server must say of itself to stand beside ours in a comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from bench.peers.home import Home

SERVED_NAME = "smollm2"


@dataclass(frozen=True, slots=True)
class Prompts:
    """How it is asked. `new_connections`: each request on one of its own, where the server closes idle ones under its clients."""

    model: str = SERVED_NAME
    as_text: bool = False
    ask_ids: bool = True
    new_connections: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started. `notes`: what the recipe wants and this machine does not have."""

    argv: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def command(self, home: Home) -> str:
        """As it may be published."""
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return home.public(" ".join([*settings, *self.argv]))


class Peer(Protocol):
    """One way to run one server. Values only: everything that lives is a `Served`."""

    @property
    def name(self) -> str:
        """As it is chosen on the command line."""

    @property
    def prompts(self) -> Prompts: ...

    @property
    def ready_path(self) -> str:
        """Answers 200 when a request would be served."""

    @property
    def start_timeout_s(self) -> float: ...

    def missing(self, home: Home) -> str:
        """Why it cannot be started here; "" when it can."""

    def install(self, home: Home) -> None:
        """Build or fetch it into its own environment. Raises PeerError."""

    def version(self, home: Home) -> str: ...

    def launch(self, home: Home, port: int) -> Launch: ...


def not_installed(name: str) -> str:
    return f"not installed: python -m bench.peers install {name}"
