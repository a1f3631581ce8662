"""All policies on one trace: the figures, a table, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.simulator.setup import Setup
from bench.simulator.slo import Slo
from bench.simulator.trace import TraceRequest
from router.policy.policies import POLICIES

Rows = dict[str, dict[str, Any]]


def compare(setup: Setup, requests: Sequence[TraceRequest], slo: Slo, policies: Sequence[str] = POLICIES) -> Rows:
    """The same requests under each policy, everything else being equal."""
    return {name: replace(setup, router=setup.router.model_copy(update={"policy": name})).run(requests, slo) for name in policies}


def table(rows: Rows) -> str:
    """One line per policy, the best goodput first."""
    lines = ["policy                hit %  TTFT p50   p95 s  TPOT p95 ms  good %  goodput %  load max/mean"]
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["goodput_fraction"]):
        lines.append(
            f"{name:20} {100 * row['hit_rate']:6.1f} {_number(row['ttft_p50_s']):>9} {_number(row['ttft_p95_s']):>7}"
            f" {_number(row['tpot_p95_s'], 1000):>12} {100 * row['good_fraction']:7.1f} {100 * row['goodput_fraction']:10.1f}"
            f" {_number(row['load_max_over_mean']):>14}"
        )
    return "\n".join(lines)


def plot(rows: Rows, path: Path) -> None:
    """Goodput and p95 TTFT by policy. Raises ImportError where matplotlib is not installed."""
    from matplotlib.figure import Figure

    names = sorted(rows, key=lambda name: rows[name]["goodput_fraction"])
    figure = Figure(figsize=(9, 0.5 * len(names) + 1.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    colours = ["tab:blue" if name == POLICIES[0] else "tab:gray" for name in names]
    left.barh(names, [100 * rows[name]["goodput_fraction"] for name in names], color=colours)
    left.set_xlabel("goodput, % of offered requests")
    right.barh(names, [rows[name]["ttft_p95_s"] or 0.0 for name in names], color=colours)
    right.set_xlabel("TTFT p95, s")
    figure.savefig(path)


def _number(value: float | None, by: float = 1.0) -> str:
    return "-" if value is None else f"{value * by:.2f}"
