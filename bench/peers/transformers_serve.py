"""`transformers serve` with continuous batching, its cache bounded (unbounded it takes what memory there is)."""

from __future__ import annotations

from dataclasses import dataclass

from bench.peers.home import Home
from bench.peers.peer import Launch, Prompts, not_installed

FOLDER = "transformers"
PACKAGES = ("torch==2.13.0", "transformers[serving]==5.24.0", "accelerate")
BLOCKS = ("--cb-block-size", "32", "--cb-num-blocks", "2048", "--cb-max-batch-tokens", "512")


@dataclass(frozen=True, slots=True)
class TransformersServe:
    """Takes text only and reports no ids: prompts have about the length that was asked for."""

    checkpoint: str = ""  # it is asked for its model by the path it was started with
    start_timeout_s: float = 180.0
    ready_path: str = "/health"

    @property
    def name(self) -> str:
        return "transformers"

    @property
    def prompts(self) -> Prompts:
        return Prompts(self.checkpoint, as_text=True, ask_ids=False)

    def missing(self, home: Home) -> str:
        return "" if home.executable(FOLDER, "transformers").exists() else not_installed(self.name)

    def install(self, home: Home) -> None:
        home.make_environment(FOLDER)
        home.pip_install(FOLDER, PACKAGES)

    def version(self, home: Home) -> str:
        return f"transformers {home.version_of(FOLDER, 'transformers')}, torch {home.version_of(FOLDER, 'torch')}"

    def launch(self, home: Home, port: int) -> Launch:
        argv = [str(home.executable(FOLDER, "transformers")), "serve", str(home.checkpoint), "--host", "127.0.0.1", "--port", str(port)]
        settings = ["--continuous-batching", "--device", "cpu", "--dtype", "bfloat16", *BLOCKS]
        return Launch((*argv, *settings), {"HF_HUB_OFFLINE": "1"})
