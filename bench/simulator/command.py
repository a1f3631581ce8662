"""The command `rantang simulate`: one trace through the production router over simulated replicas."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from bench.simulator.comparison import compare, plot, table
from bench.simulator.cost import Profile, ProfileError, read_profile
from bench.simulator.setup import Setup
from bench.simulator.slo import Slo
from bench.simulator.trace import TraceError, TraceRequest, read_trace
from bench.simulator.world import Layout
from router.config import RouterConfig
from router.policy.policies import POLICIES

app = typer.Typer(name="simulate", add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})
DEFAULT = Profile()


class Kv(StrEnum):
    FREE = "free"
    PRODUCTION = "production"


@app.command()
def simulate(
    *,
    trace: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="Mooncake's jsonl or Azure's csv.")],
    replicas: Annotated[int, typer.Option(min=1, help="Replicas.")] = 4,
    routers: Annotated[int, typer.Option(min=1, help="Routers; requests go to each in turn.")] = 1,
    speed: Annotated[float, typer.Option(help="Arrivals so many times as fast as recorded.")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many.")] = None,
    policy: Annotated[str, typer.Option(help=f"One of {', '.join(POLICIES)}.")] = POLICIES[0],
    against: Annotated[bool, typer.Option("--compare", help="All policies, as a table.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same trace: the same output, byte for byte.")] = 0,
    profile: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Step-time coefficients and sizes: YAML, or a measured replica's JSON.")
    ] = None,
    kv: Annotated[Kv, typer.Option(help="free: running KV is free; production: the real scheduler and KV manager.")] = Kv.FREE,
    cache_blocks: Annotated[
        int | None, typer.Option(min=1, help="Prefix cache (free) or pool (production) in blocks; the profile's unless given.")
    ] = None,
    step_slo_ms: Annotated[float | None, typer.Option(help="Bounds a step's prefill; none: the token budget alone does.")] = None,
    admission: Annotated[bool, typer.Option(help="Refuse what cannot keep its promise; else everybody is let in.")] = False,
    router: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="YAML with the router's configuration.")] = None,
    slo_ttft_s: Annotated[float, typer.Option(help="Time to first token that counts as goodput.")] = Slo().ttft_s,
    slo_ttft_per_token_s: Annotated[float, typer.Option(help="And so much more per prompt token.")] = 0.0,
    slo_tpot_s: Annotated[float, typer.Option(help="Time per output token that counts as goodput.")] = Slo().tpot_s,
    told: Annotated[float, typer.Option(min=0.01, help="Factor on the coefficients that replicas report.")] = 1.0,
    noise: Annotated[float, typer.Option(min=0.0, help="Relative deviation of a step's duration.")] = 0.0,
    link_ms: Annotated[float, typer.Option(min=0.0, help="Delay of a frame, each way.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="Where the picture of --compare goes (needs matplotlib).")] = None,
) -> None:
    """Simulate a trace: hit rate, latencies, goodput and coverage, under a virtual clock."""
    try:
        base = read_profile(profile) if profile else DEFAULT
        arrivals = read_trace(trace, speed=speed, limit=requests, block_tokens=base.block_size)
        config = _router(router, policy)
    except (TraceError, ProfileError, ValidationError, yaml.YAMLError) as error:
        raise typer.BadParameter(" ".join(str(error).split())) from None
    if step_slo_ms is not None:
        base = replace(base, step_slo_s=step_slo_ms / 1000)
    if cache_blocks is not None:
        base = replace(base, pool_blocks=cache_blocks) if kv is Kv.PRODUCTION else replace(base, cache_blocks=cache_blocks)
    setup = Setup(
        layout=Layout(replicas=replicas, routers=routers, delay_s=link_ms / 1000, seed=seed),
        profile=base,
        router=config,
        admission=admission,
        kv=kv.value,
        told=told,
        noise=noise,
    )
    _tell(setup, arrivals, Slo(slo_ttft_s, slo_ttft_per_token_s, slo_tpot_s), against=against, as_json=as_json, plot_to=plot_to)


def _tell(setup: Setup, arrivals: tuple[TraceRequest, ...], slo: Slo, *, against: bool, as_json: bool, plot_to: Path | None) -> None:
    if not against:
        figures = setup.run(arrivals, slo)
        typer.echo(json.dumps({"policy": setup.router.policy} | figures) if as_json else _lines(figures))
        return
    rows = compare(setup, arrivals, slo)
    typer.echo(json.dumps({"policies": rows}) if as_json else table(rows))
    if plot_to is not None:
        plot(rows, plot_to)


def _router(path: Path | None, policy: str) -> RouterConfig:
    given: dict[str, Any] = (yaml.safe_load(path.read_text()) or {}) if path else {}
    return RouterConfig.model_validate(given | {"policy": policy})


def _lines(figures: dict[str, Any]) -> str:
    return "\n".join(f"{name:26} {value}" for name, value in figures.items())


if __name__ == "__main__":
    app()
