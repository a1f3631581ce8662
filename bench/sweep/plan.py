"""What a sweep is asked to do, checked before anything starts, and all that makes it the same sweep when it is resumed."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from bench.analysis.rates import parse
from bench.hours import HOURS_MAX, check_hours
from bench.load import Load
from bench.positive import check_positive
from bench.result import RESULTS, commit
from bench.server import ServerOptions, check
from bench.slo import Slo
from bench.sweep.eta import eta_s
from bench.sweep.runner import Extent
from bench.traces import Fit
from bench.workload import Workload
from bench.workloads import workload

AUTO = "auto"
BASELINE = "baseline"


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """As given. `label`: of the configuration, where several are swept."""

    workload: str
    slo: Slo
    server: ServerOptions = field(default_factory=ServerOptions)
    rates: str = AUTO
    requests: int | None = None
    repeats: int = 1
    seed: int = 0
    refinements: int = 3
    burst: bool = True
    price_per_hour: float | None = None
    label: str = BASELINE
    folder: Path = RESULTS
    max_hours: float = HOURS_MAX
    fit: Fit = field(default_factory=Fit)


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """Checked. `base`: how requests arrive, at whatever rate."""

    options: SweepOptions
    workload: Workload
    extent: Extent
    base: Load = field(default_factory=Load)

    @property
    def state_folder(self) -> Path:
        """One for each workload and configuration label: two sweeps that differ in more refuse each other's state."""
        return self.options.folder / f"sweep-{slug(self.workload.name)}-{slug(self.options.label)}.partial"

    @property
    def identity(self) -> dict[str, str]:
        server = self.options.server
        settings = {f"setting {name}": value for name, value in sorted(server.settings.items())}
        return {
            "workload": f"{self.workload.name} {self.workload.hash()}",
            "slo": self.options.slo.description,
            "server": server.url or "a stack of its own",
            "model": server.model or "the server's first",
            "replicas": str(server.replicas),
            "repeats": str(self.options.repeats),
            "rates": self.options.rates,
            "price": "none" if self.options.price_per_hour is None else f"{self.options.price_per_hour:g}",
            "prompts": f"text {server.text_prompts or server.chat}, ids {server.ask_ids}",
            "commit": commit().removesuffix("-dirty"),
            **settings,
        }


def plan_sweep(options: SweepOptions) -> SweepPlan:
    """Raises ValueError for what cannot be swept."""
    if options.repeats < 1 or options.refinements < 0:
        raise ValueError("repeats must be at least 1, and refinements at least 0")
    check_positive(price_per_hour=options.price_per_hour)
    check(options.server)
    works = workload(options.workload, options.seed, options.requests, options.fit)
    if works.rate_per_s is None:
        raise ValueError(f"the requests of {works.name} are all due at once: no rate can be given to them")
    rates = () if options.rates == AUTO else parse(options.rates)
    check_hours(eta_s(rates, len(works), options.repeats, ()), options.max_hours)
    return SweepPlan(options, works, Extent(len(works), options.repeats, rates, options.burst, options.refinements))


def slug(text: str) -> str:
    """Fit for a file's name, short, and different for different texts."""
    plain = re.sub(r"[^a-zA-Z0-9]+", "-", text).strip("-")
    if plain == text and len(plain) <= 40:
        return plain
    return f"{plain[:40].strip('-')}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
