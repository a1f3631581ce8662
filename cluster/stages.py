"""What `rantang serve` prints: one line per stage with its time, and at the end a box. Errors are one line each, on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_NAME_WIDTH = 12


@dataclass(frozen=True, slots=True)
class Summary:
    url: str
    model: str
    dtype: str
    kernels: str  # what computes, and why it; '' for a mock
    replicas: int
    kv_tokens: int | None  # of all replicas; None if they did not say
    dashboard: str | None
    seconds: float  # from the command's start to the first request that would be served


class Stages:
    """Prints to stdout. On a terminal the running stage shows a spinner."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._start = time.monotonic()
        self.note = ""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Prints the stage when it is done, with `note` as set inside. A stage that raises prints nothing: the error does."""
        start = time.monotonic()
        self.note = ""
        if self._console.is_terminal:
            with self._console.status(f"{name} …"):
                yield
        else:
            yield
        self.say(f"{name:<{_NAME_WIDTH}}{time.monotonic() - start:6.1f} s  {self.note}".rstrip())

    def let_go(self) -> None:
        """The process ends in the middle of a stage: its line goes, and the cursor comes back."""
        if self._console.is_terminal:
            with contextlib.suppress(OSError):
                self._console.file.write("\r\x1b[K\x1b[?25h")
                self._console.file.flush()

    def say(self, line: str) -> None:
        """A reader that has gone, a closed terminal say, is no reason to stop serving."""
        with contextlib.suppress(OSError):
            self._console.print(Text(line), soft_wrap=True)
            self._console.file.flush()

    def box(self, summary: Summary) -> None:
        table = Table.grid(padding=(0, 2))
        for name, value in _rows(summary):
            table.add_row(Text(name, style="dim"), Text(value, overflow="fold"))
        with contextlib.suppress(OSError):
            self._console.print(Panel(table, title=f"ready in {summary.seconds:.1f} s", title_align="left", expand=False))
        self.say(_curl(summary))  # outside the box, so that it can be copied


def error(line: str) -> None:
    """One line on stderr, however many the cause had."""
    with contextlib.suppress(OSError):
        print("rantang: " + " ".join(line.split()), file=sys.stderr, flush=True)  # noqa: T201


def _rows(summary: Summary) -> list[tuple[str, str]]:
    rows = [
        ("URL", f"{summary.url}/v1"),
        ("model", summary.model),
        ("dtype", summary.dtype),
        *([("computes", summary.kernels)] if summary.kernels else []),
        ("replicas", str(summary.replicas)),
    ]
    if summary.kv_tokens is not None:
        rows.append(("KV tokens", f"{summary.kv_tokens:,} in all"))
    if summary.dashboard is not None:
        rows.append(("dashboard", summary.dashboard))
    return rows


def _curl(summary: Summary) -> str:
    body = f'{{"model": "{summary.model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return f"curl {summary.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
