"""A peer made of the mock: it starts a child as real servers do, and can refuse to start."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.home import Home
from bench.peers.peer import Launch, Prompts

SCRIPT = """
import asyncio, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
print("child", child.pid, flush=True)
mode, port = sys.argv[1], int(sys.argv[2])
if mode == "broken":
    sys.exit("no such model")
if mode == "mute":
    import time; time.sleep(300)
from bench.mock_openai import Fault, MockServer
async def serve():
    await MockServer(fault=Fault(mode)).start(port)
    await asyncio.Event().wait()
asyncio.run(serve())
"""


@dataclass(frozen=True, slots=True)
class FakePeer:
    """`mode`: a fault of the mock, "broken" (it dies at once) or "mute" (it never gets ready)."""

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
