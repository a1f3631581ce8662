"""A served stack started for a measurement or a test, and ended without a trace."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from bench import http_page, processes
from bench.processes import Process
from bench.result import ROOT
from cluster.environment import free_range

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
LOG_TAIL_BYTES = 64 * 1024
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
SERVE = (sys.executable, "-m", "cluster.cli", "serve")


class StackError(Exception):
    """The stack did not start or died; the message ends with the last lines it printed."""


@dataclass(slots=True)
class Stack:
    """A running `rantang serve`. `seen` remembers every process ever met, so that an orphan is still known at the end."""

    url: str
    child: subprocess.Popen[bytes]
    mark: str
    log: IO[bytes]  # has no name: it is gone with its last user, however that ends
    start_s: float  # from spawning to /ready
    seen: dict[Process, None] = field(default_factory=dict)

    def processes(self) -> list[Process]:
        family = processes.family(self.child.pid, self.mark)
        self.seen.update(dict.fromkeys(family))
        return family

    def of_role(self, role: str) -> list[Process]:
        return [process for process in self.processes() if process.role == role]

    def leftovers(self) -> list[Process]:
        """Processes of this stack that run although it was stopped."""
        return processes.alive(dict.fromkeys([*self.seen, *processes.family(self.child.pid, self.mark)]))

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> list[Process]:
        """SIGTERM, wait, and kill what is left, by number. What was left is the answer: it should be nothing. The log goes too."""
        self.processes()
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(timeout_s)
        deadline_s = time.monotonic() + 5.0
        while (left := self.leftovers()) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(5.0)
        deadline_s = time.monotonic() + 5.0
        while processes.alive(left) and time.monotonic() < deadline_s:  # a signal is no death yet
            time.sleep(0.05)
        self.log.close()
        return left

    def log_tail(self, lines: int = 30) -> str:
        """`pread`: the server writes at the same position that a plain read would move."""
        size = os.fstat(self.log.fileno()).st_size
        tail = os.pread(self.log.fileno(), LOG_TAIL_BYTES, max(0, size - LOG_TAIL_BYTES))
        return "\n".join(tail.decode(errors="replace").splitlines()[-lines:])


def _end_with_parent() -> None:
    """Runs in the child before it becomes the server: SIGTERM when the measuring process dies, however it dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def free_port() -> int:
    """A TCP port that nobody listens on now, and that no connection of Ray's takes before the server binds it."""
    return free_range(1)


def start(
    arguments: Sequence[str] = (),
    *,
    timeout_s: float = START_TIMEOUT_S,
    command: Sequence[str] = SERVE,
    environment: Mapping[str, str] | None = None,
) -> Stack:
    """Start `rantang serve` with these arguments on a free port; returns when /ready answers 200. Raises StackError."""
    port = free_port()
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **(environment or {})}
    whole = [*command, "--port", str(port), *arguments]
    started_s = time.monotonic()
    stack = spawn(whole, port, environment=environment, timeout_s=timeout_s, title=f"rantang serve {' '.join(arguments)}")
    if command == SERVE:
        _wait_settled(stack, started_s + timeout_s)
    stack.processes()
    return stack


def spawn(
    command: Sequence[str],
    port: int,
    *,
    ready_path: str = "/ready",
    environment: Mapping[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
    title: str = "the server",
) -> Stack:
    """Start any server of `port`; returns when `ready_path` answers 200. Raises StackError, and then nothing of it runs.

    It gets SIGTERM when the thread that started it ends: start servers from the main thread.
    """
    mark = secrets.token_hex(8)
    log = tempfile.TemporaryFile()  # noqa: SIM115 - the stack closes it
    started_s = time.monotonic()
    try:
        child = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, **(environment or {}), processes.MARK: mark},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    except OSError:
        log.close()
        raise
    stack = Stack(f"http://127.0.0.1:{port}", child, mark, log, 0.0)
    try:
        while get_status(stack.url + ready_path) != 200:
            if child.poll() is not None or time.monotonic() - started_s > timeout_s:
                why = f"exit code {child.poll()}" if child.poll() is not None else f"not ready after {timeout_s:g} s"
                raise StackError(f"{title}: {why}\n{stack.log_tail()}")
            time.sleep(0.2)
    except BaseException:  # an interrupted wait leaves nothing behind either
        stack.stop(10.0)
        raise
    stack.start_s = time.monotonic() - started_s
    return stack


def _wait_settled(stack: Stack, deadline_s: float) -> None:
    """Until `rantang serve` says that it is up: /ready comes first, while HAProxy still knows only Serve's own proxy."""
    while "curl " not in stack.log_tail() and stack.child.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.05)


@contextlib.contextmanager
def served(arguments: Sequence[str] = (), *, url: str | None = None) -> Iterator[str]:
    """The URL of a server: the given one, or a stack of our own for the time of the block."""
    if url is not None:
        yield url
        return
    stack = start(arguments)
    try:
        yield stack.url
    finally:
        stack.stop()


def is_ready(url: str) -> bool:
    return get_status(f"{url}/ready") == 200


def get_status(url: str, timeout_s: float = 5.0) -> int | None:
    """Status of a GET; None when nobody answers."""
    try:
        return http_page.fetch(url, timeout_s).status
    except OSError:
        return None


def get_text(url: str, timeout_s: float = 10.0, api_key: str = "") -> str:
    """Raises OSError for another status than 2xx, and for what does not come whole in time."""
    page = http_page.fetch(url, timeout_s, api_key=api_key)
    if not 200 <= page.status < 300:
        raise OSError(f"{url}: status {page.status}")
    return page.body.decode()
