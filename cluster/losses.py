"""Which processes of replicas have ended by themselves, and the line that says so: Ray says nothing, or pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_OF_REPLICA = ("Replica", "Rank")  # how the last parts of their titles begin, as in ray::ServeReplica:smollm2:Replica
_OUT_OF_MEMORY = ("oom_context", "running low on memory", "memory pressure", "OutOfMemory")


@dataclass(frozen=True, slots=True)
class Lost:
    pid: int
    part: str  # 'Replica', 'Rank1', …


class Losses:
    """Looks at the titles of processes now and then. A replica's own end comes a moment after its rank's: they are told together."""

    def __init__(self) -> None:
        self._parts: dict[int, str] = {}
        self._lost: list[Lost] = []

    def observe(self, titles: Mapping[int, str]) -> tuple[Lost, ...]:
        """All that have been lost since the last answer, once nothing more is lost."""
        parts = {pid: part for pid, title in titles.items() if (part := _part(title))}
        news = [Lost(pid, part) for pid, part in self._parts.items() if pid not in parts]
        self._parts = parts
        settled = tuple(self._lost) if not news else ()
        self._lost = [] if settled else self._lost + news
        return settled


def line(lost: tuple[Lost, ...], causes: Mapping[int, str]) -> str:
    """`causes`: Ray's words, by process, where it has any."""
    who = ", ".join(f"{each.part} (process {each.pid})" for each in lost)
    if any(word in causes.get(each.pid, "") for each in lost for word in _OUT_OF_MEMORY):
        why = "Ray ended it because the machine's memory was nearly full: fewer --replicas, a smaller --kv-cache-memory-bytes or model"
    else:
        why = "if the machine's memory is short: fewer --replicas, a smaller --kv-cache-memory-bytes or model"
    return f"warning: a replica is lost, {who}; its streams go on at another one if there is one, and a new one is started; {why}"


def _part(title: str) -> str:
    last = title.rpartition(":")[2].split()[0].partition(".")[0] if ":" in title and not title.endswith(":") else ""
    return last if last.startswith(_OF_REPLICA) else ""
