"""Routers without engines: sglang-router and vllm-router, cache aware, in front of workers that already run."""

from __future__ import annotations

from dataclasses import dataclass

from bench.peers.home import Home
from bench.peers.peer import Launch, Prompts, not_installed
from bench.stack import free_port


@dataclass(frozen=True, slots=True)
class PublicRouter:
    """`name` is its package's; `module` what Python starts. `workers`: base URLs."""

    name: str
    module: str
    requirement: str
    workers: tuple[str, ...] = ()
    start_timeout_s: float = 60.0
    ready_path: str = "/health"

    @property
    def prompts(self) -> Prompts:
        return Prompts("mock", as_text=True, ask_ids=False)

    def missing(self, home: Home) -> str:
        if not home.version_of(self.name, self.name):
            return not_installed(self.name)
        return "" if self.workers else f"{self.name} has no engine: give it workers (--workers URL,URL)"

    def install(self, home: Home) -> None:
        home.make_environment(self.name)
        home.pip_install(self.name, [self.requirement])

    def version(self, home: Home) -> str:
        return f"{self.name} {home.version_of(self.name, self.name)}"

    def launch(self, home: Home, port: int) -> Launch:
        argv = [str(home.executable(self.name, "python")), "-m", self.module, "--host", "127.0.0.1", "--port", str(port)]
        metrics = ["--prometheus-port", str(free_port())]  # a fixed one by default: two could not run
        return Launch((*argv, *metrics, "--policy", "cache_aware", "--worker-urls", *self.workers))


def sglang_router(workers: tuple[str, ...] = ()) -> PublicRouter:
    return PublicRouter("sglang-router", "sglang_router.launch_router", "sglang-router==0.3.2", workers)


def vllm_router(workers: tuple[str, ...] = ()) -> PublicRouter:
    return PublicRouter("vllm-router", "vllm_router.launch_router", "vllm-router==0.1.17", workers)
