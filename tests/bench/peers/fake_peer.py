"""A peer made of the mock: it starts a child as real servers do, may forget it, and can refuse to start."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.home import Home
from bench.peers.peer import Launch, Prompts

SCRIPT = """
import asyncio, signal, subprocess, sys
mode, port = sys.argv[1], int(sys.argv[2])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
def stop(*_):
    if mode != "careless":
        child.kill(); child.wait()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
if mode == "broken":
    sys.exit("no such model")
if mode == "mute":
    signal.pause()
from bench.mock_openai import Fault, MockServer
async def serve():
    await MockServer(fault=Fault("none" if mode == "careless" else mode)).start(port)
    await asyncio.Event().wait()
asyncio.run(serve())
"""


@dataclass(frozen=True, slots=True)
class FakePeer:
    """`mode`: a fault of the mock, "careless" (its child outlives it), "broken" (so too, and it dies at once) or "mute" (never ready)."""

    script: Path
    mode: str = "none"
    name: str = "fake"
    prompts: Prompts = field(default_factory=Prompts)
    ready_path: str = "/health"
    start_timeout_s: float = 20.0

    def missing(self, home: Home) -> str:
        return "" if self.script.exists() else "not installed: nowhere"

    def install(self, home: Home) -> None:
        self.script.write_text(SCRIPT)

    def version(self, home: Home) -> str:
        return "fake 1.0"

    def launch(self, home: Home, port: int) -> Launch:
        return Launch((sys.executable, str(self.script), self.mode, str(port)), {"FAKE": "1"}, ("without wings",))
