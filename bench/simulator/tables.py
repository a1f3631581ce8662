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

from bench import result
from bench.result import Metric, Result, write
from bench.simulator.comparison import plot
from bench.simulator.cost import Profile
from bench.simulator.setup import Setup
from bench.simulator.slo import Slo
from bench.simulator.trace import read_trace
from bench.simulator.world import Layout
from router.config import RouterConfig, TenantConfig
from router.policy.policies import POLICIES, PolicyName

OURS: PolicyName = "least_delay"
PUBLIC: tuple[PolicyName, ...] = ("random", "least_requests", "sglang_cache_aware", "ray_prefix", "dynamo_cost", "llmd_weights", "lmetric")
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
SCALED = "predicted, scaled"
WRONG = "predicted, scaled, coefficients halved, 30 % noise"
NOISY = "predicted, scaled, 30 % noise"
PROMISED = {"predicted, flat": 93.0, SCALED: 88.0, WRONG: 77.0}  # least goodput, %
BANDS = {"0.5": (45.0, 55.0), "0.9": (87.0, 93.0), "0.98": (97.0, 100.0)}
COUNTS = 2_000
STATIC = "static cap"
CAPS = (48, 64, 80, 96, 112)  # requests in flight, of four replicas
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
        for name in (OURS, *PUBLIC):
            jobs += [Job(name, replace(_setup(RouterConfig(policy=name), seed), kv="production"), Slo(), speed) for seed in range(seeds)]
    return jobs


def admission(seeds: int) -> list[Job]:
    """Speed 1.6, a cache of 1,000 blocks, a flat SLO and one that grows with the prompt."""
    small = Profile(cache_blocks=1_000, step_slo_s=CHUNK_SLO_S)
    jobs = []
    for seed in range(seeds):
        jobs.append(Job("no admission, flat", _setup(RouterConfig(), seed, small), Slo(), 1.6))
        jobs += [Job(f"{STATIC} {most}, flat", _setup(_capped(most), seed, small), Slo(), 1.6) for most in CAPS]
        for name, slo in (("flat", Slo()), ("scaled", SCALED_SLO)):
            jobs.append(Job(f"predicted, {name}", _promised(seed, small), slo, 1.6))
        wrong = replace(_promised(seed, small), told=0.5, noise=0.3)
        jobs.append(Job(WRONG, wrong, SCALED_SLO, 1.6))
        jobs.append(Job(NOISY, replace(wrong, told=1.0), SCALED_SLO, 1.6))
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


def _capped(most: int) -> RouterConfig:
    """So many requests in flight, however long; the rest is refused. Nobody has a key: all are of the tenant without a name."""
    everyone = TenantConfig.model_construct(api_keys=(), weight=1.0, requests_max=most, tokens_max=None)
    return RouterConfig().model_copy(update={"tenants": {"": everyone}})


def metrics_of(table: str, rows: Sequence[dict[str, Any]]) -> tuple[Metric, ...]:
    """Goodput by label and speed, the mean of the seeds, and what else the table is to show. Published figures are met within a point."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["label"], row["speed"]), []).append(row)
    goods = {key: mean("goodput_fraction", group) for key, group in groups.items()}
    found = []
    for (label, speed), group in groups.items():
        name, good = f"{label} @ {speed:g}", goods[label, speed]
        if table == "policies" and label in PUBLISHED:
            found.append(Metric(f"{name}: goodput", round(good, 2), "%", f"{PUBLISHED[label]} ± 1", abs(good - PUBLISHED[label]) <= 1.0))
        elif table == "policies" and label == OURS:
            found.append(result.at_least(f"{name}: goodput", good, 97.3, "%"))
            found.append(result.at_most(f"{name}: TTFT p95", mean("ttft_p95_s", group) / 100, 2.1, "s"))
        elif label in PROMISED:
            found.append(result.at_least(f"{name}: goodput", good, PROMISED[label], "%"))
        else:
            found.append(result.plain(f"{name}: goodput", good, "%"))
        if table == "admission":
            found.append(result.plain(f"{name}: goodput in tokens", mean("token_goodput_fraction", group), "%"))
        if label == SCALED:
            found.append(result.at_most(f"{name}: worst fifth of lengths over the mean", uneven(group), 3.0, "times"))
        if table == "production" and label == OURS:
            others = [one for (other, at), one in goods.items() if at == speed and other != OURS]
            if others:
                least = 1.0 if speed == 1.6 else -0.3
                found.append(result.at_least(f"{name}: goodput over the best other's", good - max(others), least, "points"))
        if label in (OURS, SCALED):
            found += covered(name, group)
    capped = {key: good for key, good in goods.items() if key[0].startswith(STATIC)}
    if capped and ("predicted, flat", 1.6) in groups:
        best_cap = max(capped, key=lambda key: capped[key])
        tokens, its = mean("token_goodput_fraction", groups["predicted, flat", 1.6]), mean("token_goodput_fraction", groups[best_cap])
        found.append(result.at_least(f"predicted, flat over {best_cap[0]}: goodput in tokens", tokens - its, 0.0, "points"))
    if {(WRONG, 1.6), (NOISY, 1.6)} <= set(goods):
        ratio = goods[WRONG, 1.6] / goods[NOISY, 1.6]
        found.append(result.at_least("halved coefficients over the right ones: goodput", ratio, 0.97, "times"))
    return tuple(found)


def mean(figure: str, rows: Sequence[dict[str, Any]]) -> float:
    """Of the seeds, times 100."""
    return 100 * sum(float(row[figure] or 0.0) for row in rows) / len(rows)


def uneven(rows: Sequence[dict[str, Any]]) -> float:
    """How much more of one fifth of the lengths is shed than of all; the mean of the seeds."""
    fifths: list[list[float]] = [row["shed_by_length_fifth"] for row in rows]
    return sum(5 * max(each) / max(1e-9, sum(each)) for each in fifths) / len(fifths)


def covered(name: str, rows: Sequence[dict[str, Any]]) -> list[Metric]:
    """How often each quantile of the time to first token held, by length to prefill, of all seeds; judged from 2,000 on."""
    found = []
    for length in sorted({each for row in rows for each in row["ttft_coverage_by_length"]}):
        counts = [row["ttft_coverage_by_length"][length] for row in rows if length in row["ttft_coverage_by_length"]]
        n = sum(each["n"] for each in counts)
        for quantile, (low, high) in BANDS.items():
            percent = 100 * sum(each["n"] * each[quantile] for each in counts) / max(1, n)
            holds = low <= percent <= high if n >= COUNTS else None
            found.append(
                Metric(f"{name}: {length} tokens, within the {quantile} quantile", round(percent, 2), "%", f"{low:g} to {high:g}", holds)
            )
    return found


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
    path = write(Result(f"simulated-{asked.table}", configuration, metrics=metrics_of(asked.table, rows), details={"rows": rows}))
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
