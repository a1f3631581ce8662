"""The workloads by name: seeded mixes of the kinds of traffic that a server meets, the works a–e, and traces from files.

Times are on a clock of one request per second on average; a `Load` gives the rate.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bench import traces
from bench.arrivals import gamma, poisson
from bench.workload import Segment, TimedCall, Workload
from bench.works import WORKS, workload_of

REQUESTS = 120  # unless said otherwise
REQUESTS_MAX = 200_000  # all are made before the first is sent
AGENT_BURSTINESS = 0.25
AGENT_CANCELLED = 0.1  # of all agents' requests
MIX = {"chat": 0.6, "agent": 0.25, "long": 0.15}


def chat(seed: int, requests: int) -> Workload:
    """Short and interactive: one system prompt for all, 20–600 tokens of a user, answers of 16–192."""
    draw = random.Random(f"chat/{seed}")
    system = Segment(f"chat/{seed}/system", 48)
    calls = tuple(
        TimedCall(due_s, (system, Segment(f"chat/{seed}/{i}", _drawn(draw, 100, 20, 600))), _drawn(draw, 64, 16, 192), group="chat")
        for i, due_s in enumerate(poisson(1.0, requests, seed))
    )
    return Workload("chat", seed, "short interactive chat: 48 shared + 20–600 in, 16–192 out", calls)


def long(seed: int, requests: int) -> Workload:
    """Large prefill, medium output, nothing shared."""
    draw = random.Random(f"long/{seed}")
    calls = tuple(
        TimedCall(due_s, (Segment(f"long/{seed}/{i}", draw.randint(1_500, 6_000)),), draw.randint(96, 192), group="long")
        for i, due_s in enumerate(poisson(1.0, requests, seed + 1))
    )
    return Workload("long", seed, "long context: 1,500–6,000 in, 96–192 out", calls)


def agent(seed: int, requests: int) -> Workload:
    """Sessions of 3–6 turns over four shared tool prompts; each turn repeats what came before; bursts; one in ten hangs up."""
    draw = random.Random(f"agent/{seed}")
    tools = [Segment(f"agent/{seed}/tools{i}", 384 + 128 * i) for i in range(4)]
    calls: list[TimedCall] = []
    starts = iter(gamma(1.0 / 4.5, requests, seed + 2, AGENT_BURSTINESS))
    while len(calls) < requests:
        session, due_s = len(calls), next(starts)
        history: tuple[Segment, ...] = (draw.choice(tools),)
        for turn in range(draw.randint(3, 6)):
            history = (*history, Segment(f"agent/{seed}/{session}/{turn}", _drawn(draw, 120, 16, 700)))
            output_tokens = _drawn(draw, 48, 8, 256)
            hangs_up = draw.uniform(0.2, 2.0) if draw.random() < AGENT_CANCELLED else None
            calls.append(TimedCall(due_s, history, output_tokens, hangs_up, "agent"))
            history = (*history, Segment(f"agent/{seed}/{session}/{turn}/answer", output_tokens))
            due_s += draw.expovariate(0.5)
    calls = sorted(calls[:requests], key=lambda call: call.due_s)
    return Workload("agent", seed, "agents: shared tools, growing histories, bursts, one in ten hangs up", _at_unit_rate(calls))


def mix(seed: int, requests: int) -> Workload:
    """Chat, agents and long prompts at once."""
    calls: list[TimedCall] = []
    for name, share in MIX.items():
        part = GENERATED[name](seed, max(1, round(share * requests)))
        calls += [replace(call, due_s=call.due_s * requests / len(part)) for call in part]
    calls.sort(key=lambda call: call.due_s)
    shares = ", ".join(f"{share:.0%} {name}" for name, share in MIX.items())
    return Workload("mix", seed, shares, _at_unit_rate(calls[:requests]))


GENERATED: dict[str, Callable[[int, int], Workload]] = {"chat": chat, "long": long, "agent": agent, "mix": mix}


def workload(name: str, seed: int = 0, requests: int | None = None, fit: traces.Fit | None = None) -> Workload:
    """By name, or from the file `name`. Raises ValueError: with the list for an unknown name, with the line of a broken trace."""
    if requests is not None and not 1 <= requests <= REQUESTS_MAX:
        raise ValueError(f"requests must be from 1 to {REQUESTS_MAX:,}, got {requests:,}")
    if name in GENERATED:
        return GENERATED[name](seed, REQUESTS if requests is None else requests)
    for work in WORKS:
        if work.name == name:
            return workload_of(work, seed, requests)
    if Path(name).is_file():
        return traces.read(Path(name), requests, fit or traces.Fit(), seed)
    raise ValueError(f"{_why_none(name)}; there are {', '.join(names())}, or a trace: a .jsonl or .csv file")


def names() -> tuple[str, ...]:
    """Of those that need no file."""
    return (*GENERATED, *(work.name for work in WORKS))


def _why_none(name: str) -> str:
    head, at, tail = name.rpartition("@")
    if Path(name).is_dir():
        return f"{name!r} is a folder, no workload"
    if name.endswith((".jsonl", ".csv")) or "/" in name:
        return f"there is no file {name!r}" if not Path(name).exists() else f"{name!r} is no file that can be read twice"
    if "," in name:
        return f"{name!r}: only one workload is swept at a time"
    if at and (head in names() or Path(head).is_file()):
        if re.fullmatch(r"[0-9.]+", tail):
            return f"{name!r}: a workload is swept over rates (--rates), and has none of its own here"
        return f"unknown workload {name!r}: {tail!r} is no rate in plain digits, such as {head}@2.5"
    return f"unknown workload {name!r}"


def _drawn(draw: random.Random, middle: int, least: int, most: int) -> int:
    """A lognormal length: half of them below `middle`, cut at both ends."""
    return min(most, max(least, round(draw.lognormvariate(math.log(middle), 0.8))))


def _at_unit_rate(calls: list[TimedCall]) -> tuple[TimedCall, ...]:
    span_s = calls[-1].due_s
    stretch = len(calls) / span_s if span_s > 0 else 1.0
    return tuple(replace(call, due_s=call.due_s * stretch) for call in calls)
