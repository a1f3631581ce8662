"""The processes of a served stack: who they are, the CPU they used and the memory they hold, read from /proc."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MARK = "RANTANG_BENCH_STACK"  # in the environment of everything a stack starts
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """One process, told from a later one with the same number by its start time (clock ticks since boot)."""

    pid: int
    started: int
    role: str
    title: str


@dataclass(frozen=True, slots=True)
class Usage:
    """By role: CPU seconds since each process began."""

    cpu_s: dict[str, float]

    def since(self, earlier: Usage) -> dict[str, float]:
        """CPU seconds by role between two looks. A role that vanished counts 0."""
        return {role: max(0.0, cpu_s - earlier.cpu_s.get(role, 0.0)) for role, cpu_s in sorted(self.cpu_s.items())}


def role_of(title: str) -> str:
    """Role by process title: router, replica, haproxy, controller, proxy, driver, or ray for all the rest of Ray.

    Serve calls every actor of a deployment a ServeReplica: `ray::ServeReplica:app:Router…` is a router.
    """
    if "haproxy" in title.split(" ", 1)[0].rsplit("/", 1)[-1]:
        return "haproxy"
    if "cluster.cli" in title or re.search(r"\brantang serve\b", title):
        return "driver"
    if not title.startswith("ray::"):
        return "ray"
    name = title.removeprefix("ray::").replace("ServeReplica:", "")
    if re.search(r"router", name, re.IGNORECASE):
        return "router"
    if re.search(r"replica|rank", name, re.IGNORECASE):
        return "replica"
    if re.search(r"controller", name, re.IGNORECASE):
        return "controller"
    if re.search(r"proxy", name, re.IGNORECASE):
        return "proxy"
    return "ray"


def family(root_pid: int, mark: str = "") -> list[Process]:
    """All living processes of a stack: the root's descendants, and whatever carries the stack's mark in its environment.

    Both, because a daemon leaves its parent and a process that sets its title may overwrite its environment.
    """
    table = {pid: stat for pid in _pids() if (stat := _stat(pid)) is not None}
    members = {pid for pid in table if pid == root_pid or (mark and _carries(pid, mark))}
    grown = True
    while grown:
        children = {pid for pid, (parent, _, _) in table.items() if parent in members and pid not in members}
        members |= children
        grown = bool(children)
    found = [Process(pid, table[pid][1], role_of(title), title) for pid in members if (title := _title(pid))]
    return sorted(found)


def alive(processes: Iterable[Process]) -> list[Process]:
    """Those that still run (zombies do not)."""
    return [process for process in processes if (stat := _stat(process.pid)) is not None and stat[1] == process.started]


def usage(processes: Iterable[Process]) -> Usage:
    """CPU used so far, user and system, all threads."""
    cpu_s: dict[str, float] = {}
    for process in processes:
        stat = _stat(process.pid)
        if stat is not None and stat[1] == process.started:
            cpu_s[process.role] = cpu_s.get(process.role, 0.0) + stat[2] / _TICKS_PER_S
    return Usage(cpu_s)


def proportional_memory_bytes(processes: Iterable[Process]) -> dict[str, int]:
    """PSS by role: resident memory, shared pages divided among those who share them."""
    pss: dict[str, int] = {}
    for process in processes:
        try:
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except OSError:
            continue
        kib = next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0)
        pss[process.role] = pss.get(process.role, 0) + kib * 1024
    return dict(sorted(pss.items()))


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> tuple[int, int, int] | None:
    """(parent, start tick, CPU ticks) of a process that runs."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return int(fields[1]), int(fields[19]), int(fields[11]) + int(fields[12])


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _carries(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
