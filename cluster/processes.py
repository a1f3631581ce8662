"""The processes below this one, read from /proc: what may still run after a stop, and what each costs in memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_KILL_TIMEOUT_S = 10.0  # one that the kernel holds in an uninterruptible wait is left to it
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    state: str  # one letter of /proc/PID/stat; Z is a zombie
    name: str


@dataclass(frozen=True, slots=True)
class Memory:
    pid: int
    title: str
    pss_bytes: int  # proportional set size: shared pages are divided among those who share them


def adopt_orphans() -> None:
    """Grandchildren whose parent dies become children of this process instead of init's, so that none is lost from sight."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[Process]:
    """Every process below `root`, parents before children; zombies included, `root` not."""
    children: dict[int, list[Process]] = {}
    for entry in sorted(int(name) for name in os.listdir(_PROC) if name.isdigit()):
        process = _read(entry)
        if process is not None:
            children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += [process.pid for process in below]
    return found


def living(root: int, but: int | None = None) -> list[Process]:
    """All below `root` that are no zombies, the process `but` left out."""
    return [process for process in _below(root, but) if process.state != "Z"]


def _below(root: int, but: int | None) -> list[Process]:
    return [process for process in descendants(root) if process.pid != but]


def titles(pids: Iterable[int]) -> dict[int, str]:
    """Command lines, where there still are any. A process may give itself another."""
    found: dict[int, str] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            found[pid] = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def end_descendants(root: int, grace_s: float, but: int | None = None) -> int:
    """SIGTERM to all below `root`, SIGKILL to those that stay longer than `grace_s`; not to `but`. Returns how many had been alive.

    Nothing of them is left, not even a name: one whose first thread has ended may have others that still do.
    Does not wait for ever: what has not gone _KILL_TIMEOUT_S after its SIGKILL will when the kernel lets it.
    """
    alive = living(root, but)
    deadline = time.monotonic() + grace_s
    _signal(alive, signal.SIGTERM)
    while living(root, but) and time.monotonic() < deadline:
        reap()
        time.sleep(_POLL_S)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while (remaining := _below(root, but)) and time.monotonic() < deadline:  # a killed process may just have started another
        _signal(remaining, signal.SIGKILL)
        reap()
        time.sleep(_POLL_S)
    return len(alive)


def reap() -> None:
    """Collect the exit status of every dead child."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def memory_table(root: int) -> list[Memory]:
    """PSS of `root` and everything below it, largest first. Processes that end meanwhile are left out."""
    rows = []
    for pid in [root, *(process.pid for process in descendants(root))]:
        try:
            rollup = (_PROC / str(pid) / "smaps_rollup").read_text()
        except OSError:
            continue
        kilobytes = next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0)
        rows.append(Memory(pid, titles([pid]).get(pid, ""), kilobytes * 1024))
    return sorted(rows, key=lambda row: (-row.pss_bytes, row.pid))


def _signal(processes: list[Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def _read(pid: int) -> Process | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")  # a name may hold spaces and brackets
    fields = rest.split()
    return Process(pid, int(fields[1]), fields[0], name)
