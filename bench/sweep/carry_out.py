"""Sweeps one configuration against its server, keeping what is finished on disk."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from bench.analysis.knee import Knee
from bench.load import Load
from bench.measurement import Question, measure, metrics_url
from bench.metrics_page import QUEUE_TIME
from bench.point import Point
from bench.request_log import RequestRow
from bench.server import Server, open_server
from bench.slo import Slo
from bench.stack import get_text
from bench.sweep.claim import claim
from bench.sweep.plan import SweepPlan
from bench.sweep.runner import Sweep
from bench.sweep.state import ResumeError, SweepState, resume


@dataclass(frozen=True, slots=True)
class Swept:
    """A finished sweep. Its state still lies on disk, until its result is written."""

    plan: SweepPlan
    state: SweepState
    knee: Knee

    @property
    def points(self) -> tuple[Point, ...]:
        """By load, the burst last."""
        return tuple(self.state.points[i] for i in self._order())

    @property
    def rows(self) -> list[RequestRow]:
        place = {index: place for place, index in enumerate(self._order())}
        rows = [msgspec.structs.replace(row, point=place[row.point]) for row in self.state.rows()]
        return sorted(rows, key=lambda row: (row.point, row.repeat, row.due_ms))

    def _order(self) -> list[int]:
        points = self.state.points
        return sorted(range(len(points)), key=lambda i: points[i].load.rate_per_s or 0.0)


def begin(plan: SweepPlan, *, restart: bool) -> SweepState:
    """What is already finished. Raises ResumeError when another sweep's state lies in the way, unless it is to be thrown away,
    and when one is running there."""
    folder = plan.state_folder
    held = claim(folder)
    if held is None:
        raise ResumeError(f"another sweep is running in {folder}: wait for it, or give this one another folder (--out)")
    if restart:
        SweepState(folder, plan.identity).clear()
    state = resume(folder, plan.identity)
    state.held = held
    return state


def check_queue_told(server: Server, slo: Slo) -> None:
    """Raises ValueError, before anything is sent, for a target of queue time where the server has no such histogram."""
    url = metrics_url(server) if slo.queue_ms is not None else None
    try:
        page = get_text(url, api_key=server.api_key) if url else ""
    except (OSError, ValueError):
        page = ""
    if slo.queue_ms is not None and QUEUE_TIME not in page:
        raise ValueError("the server does not tell its queue time in /metrics: queue_ms cannot be judged")


def carry_out(plan: SweepPlan, state: SweepState, say: Callable[[str], None]) -> Swept:
    """Raises StackError, and ValueError when nothing was answered at all."""

    def ask(server: Server, load: Load) -> tuple[Point, list[RequestRow]]:
        options = plan.options
        load = replace(plan.base, rate_per_s=load.rate_per_s)
        salt = secrets.token_hex(4)  # another one at every attempt: what an interrupted one sent lies in the server's cache
        question = Question(plan.workload, load, options.slo, options.repeats, options.price_per_hour, salt, options.label)
        measured = measure(server, question, tell=say)
        return measured.point, list(measured.rows)

    try:
        say(f"{plan.options.label}: {'measuring ' + plan.options.server.url if plan.options.server.url else 'starting a stack'} …")
        with open_server(plan.options.server) as server:
            check_queue_told(server, plan.options.slo)
            if server.replicas_note and plan.options.price_per_hour is not None:
                say(server.replicas_note)
            try:
                knee = Sweep(state, plan.extent, partial(ask, server), say).run()
            except (KeyboardInterrupt, SystemExit):
                say(f"interrupted; the same command goes on after the {len(state.points)} loads that are finished")
                raise
    finally:
        state.tidy()
    return Swept(plan, state, knee)
