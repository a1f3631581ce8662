"""What Ray reserves for a replica's ranks, and whether a cluster has room for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.config import Config

Resources = Mapping[str, float]
_ROUNDING = 1e-9  # 0.3 / 0.1 is 2.9999999999999996, and Ray counts in ten-thousandths


def of_rank(config: Config, cluster_gpus: float) -> dict[str, float]:
    """What each rank reserves: CPUs as configured; GPUs as configured, else one where the cluster has any and they may be used."""
    gpus = config.serve.replica_gpus
    if gpus is None:
        gpus = 1.0 if cluster_gpus > 0 and config.engine.device != "cpu" and config.engine.runner != "mock" else 0.0
    wanted = {"CPU": config.serve.replica_cpus, "GPU": gpus}
    return {name: amount for name, amount in wanted.items() if amount > 0}


def bundles(config: Config, cluster_gpus: float) -> list[dict[str, float]] | None:
    """A replica's placement group, a bundle per rank; None if there is one rank or nothing to reserve."""
    each = of_rank(config, cluster_gpus)
    return [dict(each) for _ in range(config.engine.tensor_parallel_size)] if each and config.engine.tensor_parallel_size > 1 else None


def contradiction(config: Config, cluster_gpus: float) -> str:
    """A strategy that no node however large makes sense of, in one line; '' without."""
    if config.engine.tensor_parallel_size == 1 or config.serve.placement_strategy != "SPREAD" or of_rank(config, cluster_gpus):
        return ""
    return "placement_strategy SPREAD takes effect with replica_cpus or replica_gpus above 0: Ray places what reserves something"


def overcommitment(config: Config, cores: int) -> str:
    """What replicas reserve beyond the cores of the one machine there is, in one line; '' when they keep to them."""
    ranks, each = config.serve.replicas * config.engine.tensor_parallel_size, config.serve.replica_cpus
    if ranks * each <= cores:
        return ""
    return f"serve.replica_cpus: {ranks} rank(s) of {each:g} CPUs each share the {cores} cores of this machine"


def shortage(config: Config, nodes: Sequence[Resources]) -> str:
    """Why these nodes cannot hold all ranks, in one line; '' when they can."""
    size, strategy = config.engine.tensor_parallel_size, config.serve.placement_strategy
    each = of_rank(config, sum(node.get("GPU", 0.0) for node in nodes))
    if not each:
        return ""
    seats = [int(min(node.get(name, 0.0) / amount + _ROUNDING for name, amount in each.items())) for node in nodes]
    takes = " and ".join(f"{amount:g} {name}" for name, amount in each.items())
    on = f"{strategy} on nodes with room for {', '.join(map(str, seats)) or 'none'}"
    if strategy == "STRICT_PACK" and size > 1:
        if max(seats, default=0) < size:
            return f"rank {max(seats, default=0)} of {size} has no device: each rank takes {takes}, placed {on} (tensor_parallel_size)"
        have = sum(seat // size for seat in seats)
    else:
        if sum(seats) < size:
            return f"rank {sum(seats)} of {size} has no device: each rank takes {takes}, placed {on} (tensor_parallel_size)"
        have = sum(seats) // size
    if have < config.serve.replicas:
        return f"room for {have} of {config.serve.replicas} replicas: each of their {size} rank(s) takes {takes}, placed {on} (replicas)"
    return ""
