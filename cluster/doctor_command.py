"""`rantang doctor`: would a replica's ranks find their devices and each other, and how fast do they add up?"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer

from cluster import deployment, local_ray, placement, processes, stages
from cluster.config import Config
from cluster.guardian import Guardian
from cluster.preflight import StartError
from cluster.run_directory import RunDirectory

if TYPE_CHECKING:  # at run time only once Ray's environment is set: they import it
    from cluster.rank_check import RankReport

_PLACED_TIMEOUT_S = 60.0
_CHECK_S = 60.0  # of the ranks, beside the time they have to join


def run(config: Config) -> int:
    """Prints a line per rank and a table of all-reduce; 0 when all is well. Every fault is one line."""
    with _ray(config):
        return check(config)


def check(config: Config) -> int:
    """On the Ray that this process has joined."""
    try:
        deployment.check_placement(config)
        reports, faults = _ask(config)
    except StartError as error:
        stages.error(str(error))
        return 1
    for line in [*(report.line for report in reports), *faults]:
        typer.echo(line)
    if faults:
        return 1
    for timing in reports[0].timings if len(reports) > 1 else ():
        slowest = max(report.timings[reports[0].timings.index(timing)].seconds for report in reports)
        rate = timing.bytes_per_s * timing.seconds / slowest
        typer.echo(
            f"all-reduce of {timing.size_bytes // 1024:,} KiB over {len(reports)} ranks: {1e3 * slowest:.2f} ms, {rate / 1e9:.2f} GB/s"
        )
    return 0


def _ask(config: Config) -> tuple[list[RankReport], list[str]]:
    """What every rank found, or the line that says why not."""
    import ray

    from cluster.rank_actors import SECRET_BYTES, create, last_line
    from cluster.rank_check import CheckedRank

    size = config.engine.tensor_parallel_size
    with _placement_group(config) as group:
        actors = [create(CheckedRank, f"doctor:Rank{rank}", rank, group=group) for rank in range(size)]
        try:
            try:
                host = ray.get(actors[0].address.remote(), timeout=_PLACED_TIMEOUT_S)
                port = ray.get(actors[0].open.remote(host), timeout=_PLACED_TIMEOUT_S)
            except Exception as error:
                return [], [f"rank 0: {last_line(error)}"]
            secret = secrets.token_bytes(SECRET_BYTES)
            checks = [actor.check.remote(config.engine, rank, host, port, secret) for rank, actor in enumerate(actors)]
            return _collect(checks)
        finally:
            for actor in actors:
                ray.kill(actor)


def _collect(checks: Sequence[Any]) -> tuple[list[RankReport], list[str]]:
    import ray

    from cluster.rank_actors import JOIN_TIMEOUT_S, last_line

    reports: list[RankReport] = []
    faults: list[str] = []
    deadline_s = time.monotonic() + JOIN_TIMEOUT_S + _CHECK_S
    for rank, pending in enumerate(checks):
        try:
            reports.append(ray.get(pending, timeout=max(0.1, deadline_s - time.monotonic())))
        except Exception as error:
            said = last_line(error)
            faults.append(said if said.startswith(f"rank {rank}") else f"rank {rank}: {said}")
    return reports, faults


@contextlib.contextmanager
def _placement_group(config: Config) -> Iterator[Any]:
    """As a replica has it; None where nothing is reserved. Removed at the end."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    gpus = float(ray.cluster_resources().get("GPU", 0.0))
    each = placement.of_rank(config, gpus)
    if not each:
        yield None
        return
    bundles = [dict(each) for _ in range(config.engine.tensor_parallel_size)]
    group = placement_group(bundles, strategy=config.serve.placement_strategy)
    try:
        if not group.wait(_PLACED_TIMEOUT_S):
            raise StartError(f"Ray did not reserve {bundles} by {config.serve.placement_strategy} within {_PLACED_TIMEOUT_S:g} s")
        yield group
    finally:
        remove_placement_group(group)


@contextlib.contextmanager
def _ray(config: Config) -> Iterator[None]:
    """The cluster that `rantang serve` would use, or one of our own that leaves nothing behind."""
    address = local_ray.joined_address(config)
    if address is not None:
        try:
            local_ray.join(config, address)
            yield
        finally:
            local_ray.stop()
        return
    directory, guardian = RunDirectory.create(), Guardian()
    try:
        processes.adopt_orphans()
        local_ray.prepare(config, directory)
        local_ray.start(config, directory)
        guardian.watch(process.pid for process in processes.living(os.getpid(), but=guardian.pid))
        yield
    finally:
        local_ray.stop()
        processes.end_descendants(os.getpid(), 1.0, but=guardian.pid)
        guardian.dismiss()
        directory.remove()
