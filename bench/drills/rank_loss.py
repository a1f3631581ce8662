"""Drill: ranks of tensor-parallel replicas are killed and frozen, and rank 0 killed, again and again under streams (FLO-13).

Each time all streams move in time, none is lost, changed or doubled, and the replica is back in time; at the end nothing is left
behind: no process, no placement group, no reserved CPU, no listening port more than before.
`python -m bench.drills.rank_loss --kills 10`; a text may differ only behind a near-tie, as in bench.drills.failover.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import tempfile
import time
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import uvloop

from bench import metrics_page, processes, result, stack
from bench.connection import Target
from bench.drills import ray_state
from bench.drills.failover import calls, differences, last_move, moves, silence_s, under_way
from bench.drills.ray_state import RayState
from bench.drills.verdict import Difference, lost_streams
from bench.load_client import LoadClient
from bench.processes import Process
from bench.record import RequestRecord
from bench.result import Result
from bench.stack import Stack
from cluster.rank_watch import SILENCE_S

MOVED_BOUND_S = 2.0  # FLO-13, of a kill
FROZEN_MOVED_BOUND_S = 3.0  # the routers' stall limit of 2 s, seen a few times a second: nothing closes when a process is frozen
REPLACED_BOUND_S = 20.0  # of a kill, which is known at once
FROZEN_REPLACED_BOUND_S = REPLACED_BOUND_S + SILENCE_S  # a rank that does not answer is given up after its silence
REPLACED_TIMEOUT_S = 120.0
SETTLE_TIMEOUT_S = 10.0  # FLO-13
SETTLE_POLL_S = 0.5
START_TIMEOUT_S = 600.0
REPLICAS = 2
FAULTS = ("kill a rank", "freeze a rank", "kill rank 0")
_RANK = re.compile(r"^ray::[^ ]*:Rank(\d+)")
_REPLICA = re.compile(r"^ray::ServeReplica:.*:Replica")


@dataclass(frozen=True, slots=True)
class Holding:
    """What a stack holds while it serves."""

    ranks: int
    ray: RayState
    ports: int


@dataclass(frozen=True, slots=True)
class Loss:
    """One fault and what came of it. Seconds count from the fault; None: not within the time limit."""

    fault: str
    disturbed: tuple[RequestRecord, ...]
    differences: tuple[Difference, ...]
    doubled: int
    moved_after_s: float | None
    silence_s: float
    replaced_after_s: float | None

    @property
    def lost_streams(self) -> dict[str, str]:
        """What became of each stream that did not complete, by its number."""
        return lost_streams(self.disturbed)

    @property
    def lost(self) -> int:
        return len(self.lost_streams)

    @property
    def changed(self) -> int:
        return sum(not difference.excused for difference in self.differences)


def ranks(served: Stack) -> list[Process]:
    """All processes of replicas, rank 0 among them."""
    return [process for process in served.processes() if _RANK.match(process.title) or _REPLICA.match(process.title)]


def victim(served: Stack, fault: str) -> Process:
    wanted = _REPLICA if fault == "kill rank 0" else _RANK
    return next(process for process in ranks(served) if wanted.match(process.title))


def holding(served: Stack, run_directory: Path) -> Holding:
    return Holding(len(ranks(served)), ray_state.read(run_directory), listening_ports(served.processes()))


def listening_ports(family: list[Process]) -> int:
    """TCP sockets on which one of these processes listens."""
    listening = {
        fields[9]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if (fields := line.split())[3] == "0A"
    }
    held = set()
    for process in family:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    held.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    return len(listening & held)


async def lose(served: Stack, fault: str, undisturbed: tuple[RequestRecord, ...], output_tokens: int) -> Loss:
    """One fault under all streams; waits until the stack is whole again."""
    client = LoadClient(Target.parse(served.url))
    whole = len(ranks(served))
    hit = victim(served, fault)
    try:
        streams = [asyncio.create_task(client.send(call)) for call in calls(output_tokens)]
        await under_way(client, 0, len(streams) * output_tokens // 4)
        before = await moves(served.url)
        fault_s = time.perf_counter()
        moving = asyncio.create_task(last_move(served.url, before))
        os.kill(hit.pid, signal.SIGSTOP if fault.startswith("freeze") else signal.SIGKILL)
        replacing = asyncio.create_task(_replaced(served, hit, whole))
        disturbed = await asyncio.gather(*streams)
        moving.cancel()
        moved_s = await moving
        replaced_s = await replacing
    finally:
        client.close()
        if processes.alive([hit]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(hit.pid, signal.SIGCONT)
    return Loss(
        fault,
        tuple(disturbed),
        differences(undisturbed, disturbed),
        sum(after.tokens_seen > before.tokens_seen for before, after in zip(undisturbed, disturbed, strict=True)),
        moved_s - fault_s if moved_s is not None else None,
        max((silence_s(record, fault_s) for record in disturbed), default=0.0),
        replaced_s - fault_s if replaced_s is not None else None,
    )


async def _replaced(served: Stack, hit: Process, whole: int) -> float | None:
    """When as many ranks run as before without the victim's, and every replica is known to a router."""
    deadline_s = time.perf_counter() + REPLACED_TIMEOUT_S
    while time.perf_counter() < deadline_s:
        now = await asyncio.to_thread(ranks, served)
        if len(now) >= whole and hit.pid not in {process.pid for process in now} and await asyncio.to_thread(_all_serve, served.url):
            return time.perf_counter()
        await asyncio.sleep(0.25)
    return None


def _all_serve(url: str) -> bool:
    """A router is connected to as many replicas as there are to be. One that does not answer, as on a busy machine, is asked again."""
    try:
        page = stack.get_text(f"{url}/metrics")
    except OSError:
        return False
    return metrics_page.parse(page).values.get("rantang:replicas", 0.0) >= REPLICAS


async def run(served: Stack, run_directory: Path, kills: int, output_tokens: int) -> tuple[Holding, list[Loss], Holding]:
    client = LoadClient(Target.parse(served.url))
    try:
        undisturbed = tuple(await asyncio.gather(*(client.send(call) for call in calls(output_tokens))))
    finally:
        client.close()
    if lost := lost_streams(undisturbed):
        raise stack.StackError(f"streams were lost before any fault: {lost}\n{served.log_tail()}")
    before = holding(served, run_directory)
    losses: list[Loss] = []
    for number in range(kills):
        losses.append(await lose(served, FAULTS[number % len(FAULTS)], undisturbed, output_tokens))
        told = losses[-1]
        print(f"{number + 1}: {told.fault}: moved {told.moved_after_s}, whole again {told.replaced_after_s} s", flush=True)
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    after = holding(served, run_directory)
    for _ in range(int(SETTLE_TIMEOUT_S / SETTLE_POLL_S)):
        if after == before or time.monotonic() > deadline_s:
            break
        await asyncio.sleep(SETTLE_POLL_S)
        after = holding(served, run_directory)
    return before, losses, after


def report(losses: list[Loss], before: Holding, after: Holding, left: int, configuration: dict[str, str]) -> Result:
    def worst(values: list[float | None]) -> float | None:
        return None if any(value is None for value in values) else max((value for value in values if value is not None), default=None)

    moved, replaced = attrgetter("moved_after_s"), attrgetter("replaced_after_s")
    metrics = [
        result.at_least("kills", float(len(losses)), 1, "faults"),
        result.at_most("lost", float(sum(loss.lost for loss in losses)), 0, "streams"),
        result.at_most("changed", float(sum(loss.changed for loss in losses)), 0, "streams"),
        result.at_most("doubled", float(sum(loss.doubled for loss in losses)), 0, "streams"),
        *(
            result.at_most(name, worst([seconds(loss) for loss in hit]), bound_s, "s")
            for name, frozen, seconds, bound_s in (
                ("moved_after_worst", False, moved, MOVED_BOUND_S),
                ("moved_after_freeze_worst", True, moved, FROZEN_MOVED_BOUND_S),
                ("replaced_after_worst", False, replaced, REPLACED_BOUND_S),
                ("replaced_after_freeze_worst", True, replaced, FROZEN_REPLACED_BOUND_S),
            )
            if (hit := [loss for loss in losses if loss.fault.startswith("freeze") == frozen])
        ),
        result.at_most("ranks_left_over", float(after.ranks - before.ranks), 0, "processes"),
        result.at_most("placement_groups_leaked", float(after.ray.placement_groups - before.ray.placement_groups), 0, "groups"),
        result.at_most("cpus_leaked", after.ray.in_use.get("CPU", 0.0) - before.ray.in_use.get("CPU", 0.0), 0, "CPUs"),
        result.at_most("ports_leaked", float(after.ports - before.ports), 0, "ports"),
        result.at_most("processes_after_stop", float(left), 0, "processes"),
        result.plain("excused_near_ties", float(sum(len(loss.differences) - loss.changed for loss in losses)), "streams"),
    ]
    details: list[object] = [
        {
            "fault": loss.fault,
            "moved_after_s": loss.moved_after_s,
            "silence_s": loss.silence_s,
            "replaced_after_s": loss.replaced_after_s,
            "lost": loss.lost_streams,
        }
        for loss in losses
    ]
    return Result("rank-loss", configuration, metrics=tuple(metrics), details={"losses": details})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tensor-parallel-size", type=int, default=3)
    options = parser.parse_args()
    arguments = [options.model, "--served-model-name", "smollm2", "--replicas", str(REPLICAS), "--dtype", "float32"]
    arguments += [
        "--tensor-parallel-size",
        str(options.tensor_parallel_size),
        "--replica-cpus",
        "0.1",
    ]  # so that there is a placement group
    arguments += ["--kv-cache-memory-bytes", str(64 * 1024 * 1024), "--queue-time-slo-s", "300"]  # no refusal may pass for a loss
    with tempfile.TemporaryDirectory(prefix="rt", dir="/tmp") as scratch:
        os.environ["TMPDIR"] = scratch
        try:
            served = stack.start(arguments, timeout_s=START_TIMEOUT_S)
        except stack.StackError as error:
            print(error)
            return 1
        try:
            run_directory = next(Path(scratch).glob("rantang-*"))
            before, losses, after = uvloop.run(run(served, run_directory, options.kills, options.output_tokens))
        except stack.StackError as error:
            print(error)
            return 1
        finally:
            left = served.stop()
    drill = report(losses, before, after, len(left), {"serve": " ".join(arguments), "output_tokens": str(options.output_tokens)})
    result.show(drill)
    return 0 if drill.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
