"""The tables of the router and of admission, by one command each: `python -m bench.simulator.tables NAME --trace FILE`.

What a table compares runs in processes of its own, two at a time; the result goes to bench/results like every other.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.result import Metric, Result, write
from bench.simulator.comparison import plot
from bench.simulator.cost import Profile
from bench.simulator.setup import Setup
from bench.simulator.slo import Slo
from bench.simulator.trace import read_trace
from bench.simulator.world import Layout
from router.config import RouterConfig
from router.policy.policies import POLICIES, PolicyName

OURS: PolicyName = "least_ttft"
BEST: tuple[PolicyName, ...] = (OURS, "lmetric", "llmd_weights", "ray_prefix")
# good %, of the public rules as simulated before there was this tree: a replica of the same costs, other code
PUBLISHED = {
    "random": 77.1,
    "least_requests": 90.8,
    "sglang_cache_aware": 93.6,
    "ray_prefix": 95.9,
    "dynamo_cost": 92.0,
    "llmd_weights": 97.2,
    "lmetric": 97.3,
}
WIDE = RouterConfig(queue_depth_max=10_000, queue_tokens_max=1_000_000_000)  # promises bound the queue, not its static caps
SCALED_SLO = Slo(1.0, 2 / 20_000)
CHUNK_SLO_S = 0.08  # of the 100 ms per token that are promised: steps as long as that would leave nothing for the way


@dataclass(frozen=True, slots=True)
class Job:
    """One line of a table."""

    label: str
    setup: Setup
    slo: Slo
    speed: float

    @property
    def seed(self) -> int:
        return self.setup.layout.seed


def run_job(job: Job, trace: Path, requests: int | None) -> dict[str, Any]:
    figures = job.setup.run(read_trace(trace, speed=job.speed, limit=requests, block_tokens=job.setup.profile.block_size), job.slo)
    return {"label": job.label, "speed": job.speed, "seed": job.seed, "policy": job.setup.router.policy, "slo": asdict(job.slo)} | figures


def policies(seeds: int) -> list[Job]:
    """Every policy at speed 1.2: running KV free, a cache of 8,000 blocks, everybody let in."""
    return [Job(name, _setup(RouterConfig(policy=name), seed), Slo(), 1.2) for name in POLICIES for seed in range(seeds)]


def production(seeds: int) -> list[Job]:
    """The real scheduler and KV manager with a pool of 8,000 blocks, from a calm to an overloaded cluster."""
    jobs = []
    for speed in (1.6, 1.2, 0.8, 1.0, 1.4):
        for name in BEST:
            jobs += [Job(name, replace(_setup(RouterConfig(policy=name), seed), kv="production"), Slo(), speed) for seed in range(seeds)]
    return jobs


def admission(seeds: int) -> list[Job]:
    """Speed 1.6, a cache of 1,000 blocks, a flat SLO and one that grows with the prompt."""
    small = Profile(cache_blocks=1_000, step_slo_s=CHUNK_SLO_S)
    jobs = []
    for seed in range(seeds):
        jobs.append(Job("no admission, flat", _setup(RouterConfig(), seed, small), Slo(), 1.6))
        for name, slo in (("flat", Slo()), ("scaled", SCALED_SLO)):
            jobs.append(Job(f"predicted, {name}", _promised(seed, small), slo, 1.6))
        wrong = replace(_promised(seed, small), told=0.5, noise=0.3)
        jobs.append(Job("predicted, scaled, coefficients halved, 30 % noise", wrong, SCALED_SLO, 1.6))
        jobs.append(Job("predicted, scaled, 30 % noise", replace(wrong, told=1.0), SCALED_SLO, 1.6))
    return jobs


def routers(seeds: int) -> list[Job]:
    """What several routers lose that see each other's work by the replicas' reports only."""
    jobs = []
    for count in (1, 2, 8):
        for seed in range(seeds):
            setup = _setup(RouterConfig(), seed)
            jobs.append(Job(f"{count} routers", replace(setup, layout=replace(setup.layout, routers=count)), Slo(), 1.2))
    return jobs


TABLES = {"policies": policies, "production": production, "admission": admission, "routers": routers}


def _setup(router: RouterConfig, seed: int, profile: Profile | None = None) -> Setup:
    return Setup(layout=Layout(seed=seed), profile=profile or Profile(), router=router)


def _promised(seed: int, profile: Profile) -> Setup:
    return replace(_setup(WIDE, seed, profile), admission=True)


def metrics_of(rows: Sequence[dict[str, Any]]) -> tuple[Metric, ...]:
    """Goodput by label and speed, the mean of the seeds; where a figure was published, whether ours is within a point of it."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["label"], row["speed"]), []).append(row)
    found = []
    for (label, speed), group in groups.items():
        good = 100 * sum(row["goodput_fraction"] for row in group) / len(group)
        published = PUBLISHED.get(label) if speed == 1.2 and "cache_blocks" not in label else None
        bound = "" if published is None else f"{published} ± 1"
        holds = None if published is None else abs(good - published) <= 1.0
        found.append(Metric(f"{label} @ {speed:g}: goodput", round(good, 2), "%", bound, holds))
    return tuple(found)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tables of simulated policies and admission, written to bench/results.")
    parser.add_argument("table", choices=sorted(TABLES))
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake's conversation trace")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--policy", action="append", help="only these (repeatable)")
    parser.add_argument("--speed", action="append", type=float, help="only these (repeatable)")
    asked = parser.parse_args()
    jobs = [
        job
        for job in TABLES[asked.table](asked.seeds)
        if (not asked.policy or job.setup.router.policy in asked.policy) and (not asked.speed or job.speed in asked.speed)
    ]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(asked.workers) as pool:
        for row in pool.map(run_job, jobs, [asked.trace] * len(jobs), [asked.requests] * len(jobs)):
            rows.append(row)
            print(line(row), flush=True)
    configuration = {"trace": asked.trace.name, "requests": str(asked.requests or "all"), "seeds": str(asked.seeds)}
    path = write(Result(f"simulated-{asked.table}", configuration, metrics=metrics_of(rows), details={"rows": rows}))
    if asked.table == "policies":
        plot({row["label"]: row for row in rows if row["seed"] == 0}, path.with_suffix(".svg"))
    print(path)


def line(row: dict[str, Any]) -> str:
    p95_s = row["ttft_p95_s"] or 0.0
    return (
        f"{row['label']:52} x{row['speed']:g} seed {row['seed']}: hit {100 * row['hit_rate']:.1f} %, TTFT p95 {p95_s:.2f} s,"
        f" good {100 * row['good_fraction']:.1f} %, goodput {100 * row['goodput_fraction']:.1f} %,"
        f" in tokens {100 * row['token_goodput_fraction']:.1f} %, shed {100 * row['shed_fraction']:.1f} %"
    )


if __name__ == "__main__":
    main()
