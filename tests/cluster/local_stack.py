"""A running `rantang serve` with mock runners, and a helper process that has joined its Ray.

pytest itself never imports ray: what Ray does at import and at exit stays in processes that the tests end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from cluster import processes
from cluster.environment import free_range

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 90.0
STEP_MS = 40  # of the mock: slow enough that a stream can be caught while it runs


class Stack:
    """A running `rantang serve`, the process that a user would start and stop."""

    def __init__(self, *flags: str) -> None:
        self.port = free_range(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.scratch = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))
        self.output = self.scratch / "output"
        command = [
            sys.executable,
            "-m",
            "cluster.cli",
            "serve",
            "--runner",
            "mock",
            "--mock-step-ms",
            str(STEP_MS),
            "--port",
            str(self.port),
        ]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *flags], stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=self.environment(), start_new_session=True
            )

    def environment(self) -> dict[str, str]:
        own = {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.scratch), "OMP_NUM_THREADS": "1"}
        return {**{name: value for name, value in os.environ.items() if not name.startswith("RAY_")}, **own}

    def wait_ready(self) -> None:
        """Until the box is printed: every replica runs and the router would serve."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while "curl " not in self.output.read_text():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.2)

    def status(self, path: str) -> int:
        """HTTP status of a GET; 0 when nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def stream(self, tokens: int, prefix: str = "", **fields: Any) -> Any:
        """A completion of exactly `tokens` tokens, streamed; read it with `read_stream`. `fields` go into the request."""
        body = {"model": "smollm2", "prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True, "stream": True, "return_token_ids": True}
        body |= fields
        request = urllib.request.Request(
            self.url + prefix + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=120)

    def titles(self) -> dict[int, str]:
        """Command lines of the stack and everything below it; of one that has ended, nothing or an empty one."""
        found = {}
        for pid in (self.process.pid, *(process.pid for process in processes.descendants(self.process.pid))):
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def replica_pids(self) -> list[int]:
        return [pid for pid, title in self.titles().items() if title.startswith("ray::ServeReplica:smollm2:Replica")]

    def run_directory(self) -> Path:
        return next(self.scratch.glob("rantang-*"))

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)

    def remove(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
        if self.process.poll() is None:
            left = processes.descendants(self.process.pid)
            self.process.kill()
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)


class Driver:
    """A process that has joined the stack's Ray and does what it is told (ray_driver.py)."""

    def __init__(self, stack: Stack) -> None:
        run = stack.run_directory()
        address = (run / "ray-address").read_text()
        environment = {
            **stack.environment(),
            "RAY_ADDRESS": address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(run / "ray-token"),
        }
        self._log = (stack.scratch / "driver").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ray_driver.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env=environment,
            text=True,
        )

    def ask(self, command: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def close(self) -> None:
        """Again is nothing. Before its Ray ends: what has joined a Ray that is gone takes long to leave."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def read_stream(response: Any) -> tuple[list[int], bool]:
    """(token ids, ended by [DONE]) of a streamed completion."""
    ids: list[int] = []
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return ids, True
        event = json.loads(data)
        assert "error" not in event, event
        ids += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
    return ids, False
