"""Whether one load kept its SLO, in one line: what broke, and which of its requests and readings say so."""

from __future__ import annotations

from bench.analysis.evidence import Evidence
from bench.analysis.knee import KEPT_PERCENT
from bench.analysis.steadiness import unsteadiness
from bench.analysis.targets import broken_targets
from bench.quantiles import quantile
from bench.slo import Slo


def verdict(e: Evidence) -> str:
    """A sentence; sheds and failures are named whether there is an SLO or not."""
    broken = broken_targets(e.at, e.slo)
    share = e.at.median("attainment_percent")
    if share is None:
        return "no request can be judged"
    if e.slo == Slo():
        return "no SLO was given" + (f"; {', '.join(broken)}" if broken else "")
    within = f"{share:.3g} % of the requests within it"
    if not e.broken:
        doubts = [*broken, *filter(None, [unsteadiness(e.at)])]
        return f"SLO kept: {within}" + (f"; yet {', '.join(doubts)}" if doubts else "")
    words = "; ".join([*broken, f"{within}, {KEPT_PERCENT:g} % are needed"])
    return ". ".join([f"SLO broken: {words}", *filter(None, (_late_prompts(e), _late_gaps(e), _refused(e)))])


def _late_prompts(e: Evidence) -> str:
    late, others = e.late_prompts, e.timely_prompts
    if not late:
        return ""
    of = "" if not others else f" (others: {len(others)}, about {_middle(others):,.0f}, {_middle_ms(others):,.0f} ms)"
    return (
        f"Late first tokens: {len(late)} of {len(late) + len(others)} answers,"
        f" with about {_middle(late):,.0f} new prompt tokens, {_middle_ms(late):,.0f} ms{of}"
    )


def _late_gaps(e: Evidence) -> str:
    late, of = e.late_gaps
    return f"Gaps above the target: in {late} of {of} answers" if late else ""


def _refused(e: Evidence) -> str:
    """What the server was doing where it refused."""
    shed = e.figure("shed_percent")
    readings = (
        ("{:.0f} waited", "waiting_max"),
        ("{:.0f} ran", "running_max"),
        ("{:.1f} % of the KV pool was in use", "kv_use_max_percent"),
    )
    seen = [words.format(value) for words, name in readings if (value := e.figure(name)) is not None]
    if not shed or not seen:
        return ""
    return f"While {shed:.0f} % were refused, at most {', '.join(seen)}"


def _middle(prompts: tuple[tuple[int, float], ...]) -> float:
    return quantile([float(tokens) for tokens, _ in prompts], 0.5) or 0.0


def _middle_ms(prompts: tuple[tuple[int, float], ...]) -> float:
    return quantile([ms for _, ms in prompts], 0.5) or 0.0
