"""The same works against each server in turn, one at a time; ours first and last, so that the machine's drift shows."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from bench import processes, result
from bench.peers.contestant import Contestant, Running
from bench.peers.home import PeerError
from bench.peers.same_model import SameModel
from bench.result import Metric, Result, WorkResult
from bench.usage import run_loop
from bench.works import Work

Measure = Callable[[Contestant, str], Awaitable[tuple[WorkResult, ...]]]
Check = Callable[[Contestant, str], Awaitable[SameModel | None]]
PEERS = "peers"  # a result of this name compares servers
LONG_PROMPT = "e"  # compared by its time to first token; the others by output tokens/s
AGAIN = " again"
TEXT_OFF_PERCENT_MAX = 2.0  # a begin token of its own may be added to a prompt sent as text, and no more


@dataclass(frozen=True, slots=True)
class Column:
    """One server's part of the table. `skipped`: why there is nothing in it."""

    name: str
    version: str = ""
    command: str = ""
    notes: tuple[str, ...] = ()
    start_s: float | None = None
    idle_mib: float | None = None  # PSS of all its processes after the start
    loaded_mib: float | None = None  # the same after the works
    same_model: SameModel | None = None
    works: tuple[WorkResult, ...] = ()
    skipped: str = ""

    def work(self, name: str) -> WorkResult | None:
        return next((work for work in self.works if work.name == name), None)

    def figure(self, work_name: str) -> float | None:
        """What is compared; None where a request failed, or its text was another length: then its figures are no equal's."""
        work = self.work(work_name)
        if work is None or work.summary.completed < work.summary.requests:
            return None
        if abs(work.summary.text_off_percent or 0.0) > TEXT_OFF_PERCENT_MAX:
            return None
        return work.summary.latencies.ttft_ms.p50 if work_name == LONG_PROMPT else work.summary.output_tokens_per_s


def compare(
    ours: Sequence[Contestant], others: Sequence[Contestant], measure: Measure, check: Check, say: Callable[[str], None]
) -> Iterator[Column]:
    """A column for each, as soon as it is finished: ours, the others, ours again (when there are others)."""
    again = [replace(one, name=one.name + AGAIN) for one in ours] if others else []
    for contestant in [*ours, *others, *again]:
        say(f"{contestant.name} …")
        column = column_of(contestant, measure, check)
        say(f"{contestant.name}: {column.skipped or 'done'}")
        yield column


def check_names(ours: Sequence[Contestant], others: Sequence[Contestant]) -> None:
    """Columns are told apart by their names: raises ValueError for one given twice, and for a name that a second run of ours has."""
    names = [one.name for one in (*ours, *others)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is given twice: a server is one column")
        if name.endswith(AGAIN):
            raise ValueError(f"{name!r}: a name cannot end in {AGAIN!r}, which our second run has")


def column_of(contestant: Contestant, measure: Measure, check: Check) -> Column:
    try:
        with contestant.run() as running:
            return run_loop(_measured(contestant, running, measure, check))
    except PeerError as error:
        return Column(contestant.name, skipped=str(error))


async def _measured(contestant: Contestant, running: Running, measure: Measure, check: Check) -> Column:
    idle = _memory_mib(running)
    works = await measure(contestant, running.url)
    loaded = _memory_mib(running)
    return Column(
        contestant.name,
        running.version,
        running.command,
        running.notes,
        None if running.stack is None else round(running.stack.start_s, 1),
        idle,
        loaded,
        await check(contestant, running.url),
        works,
    )


def _memory_mib(running: Running) -> float | None:
    if running.stack is None:
        return None
    return round(sum(processes.proportional_memory_bytes(running.stack.processes()).values()) / 2**20)


def ratio(ours: float | None, theirs: float | None, work: str) -> float | None:
    """Above 1: ours is better."""
    if not ours or not theirs:
        return None
    return theirs / ours if work == LONG_PROMPT else ours / theirs


def mean_of_ours(columns: Sequence[Column], label: str, work: str) -> float | None:
    """Geometric mean of first and last: drift in between falls on neither side."""
    figures = [figure for column in columns if column.name in (label, label + AGAIN) and (figure := column.figure(work)) is not None]
    return math.prod(figures) ** (1 / len(figures)) if figures else None


def metrics_of(columns: Sequence[Column], labels: Sequence[str], works: Sequence[Work]) -> tuple[Metric, ...]:
    """Ratios of ours to every other, the drift of ours between first and last, and whether all served the same model."""
    metrics: list[Metric] = []
    by_name = {column.name: column for column in columns}
    others = [column for column in columns if column.name.removesuffix(AGAIN) not in labels and not column.skipped]
    for label in labels:
        for work in works:
            own = mean_of_ours(columns, label, work.name)
            for other in others:
                metrics.append(
                    result.plain(f"{label}/{other.name}.{work.name}", ratio(own, other.figure(work.name), work.name), "times as good")
                )
            if label in by_name and label + AGAIN in by_name:
                drift = ratio(by_name[label + AGAIN].figure(work.name), by_name[label].figure(work.name), work.name)
                metrics.append(result.plain(f"{label}.drift.{work.name}", drift, "last / first"))
    for column in columns:
        if column.same_model is not None:
            wrong = column.same_model.different + column.same_model.failed
            metrics.append(result.at_most(f"{column.name}.other_model", float(wrong), 0, f"of {column.same_model.prompts} prompts"))
    return tuple(metrics)


def result_of(columns: Sequence[Column], labels: Sequence[str], works: Sequence[Work], configuration: dict[str, str]) -> Result:
    named = tuple(replace(work, name=f"{column.name}/{work.name}") for column in columns for work in column.works)
    details: dict[str, object] = {"columns": [{**asdict(column), "works": [work.name for work in column.works]} for column in columns]}
    return Result(PEERS, configuration, named, metrics_of(columns, labels, works), details)
