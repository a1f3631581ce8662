"""Which configuration keeps the SLO at the least cost per accepted response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.analysis.at_load import AtLoad, ascending
from bench.analysis.interval import difference
from bench.analysis.knee import Knee, find_knee
from bench.analysis.number import short
from bench.analysis.targets import broken_targets
from bench.positive import check_positive
from bench.slo import Slo

SAME = 0.02  # costs and knees this close, relatively, are the same; so are knees between the same two loads


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration and its sweep."""

    name: str
    replicas: int
    points: tuple[AtLoad, ...]


@dataclass(frozen=True, slots=True)
class Demand:
    """`load_per_s`: responses per second that clients want; None: each configuration is judged at its own knee."""

    slo: Slo
    load_per_s: float | None = None
    price_per_replica_hour: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError for a load or a price that is none."""
        check_positive(load=self.load_per_s, price_per_hour=self.price_per_replica_hour)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One candidate judged. The figures are those of the judged load; None when it does not keep the SLO there."""

    candidate: Candidate
    knee: Knee
    offered_per_s: float | None = None  # with the retries of whoever was refused
    accepted_per_s: float | None = None
    retries_per_accepted: float | None = None
    idle_percent: float | None = None  # of what it could bear at the knee
    cost_per_1000: float | None = None
    fault: str = ""  # why it does not keep the SLO

    @property
    def keeps(self) -> bool:
        return self.cost_per_1000 is not None


@dataclass(frozen=True, slots=True)
class Choice:
    """`winner` None: no candidate keeps the SLO. The others best first, each with why it lost."""

    winner: Verdict | None
    others: tuple[tuple[Verdict, str], ...]


def judge(candidate: Candidate, demand: Demand) -> Verdict:
    """Cost per accepted response at the load asked for, replicas paid whether busy or idle, the refused trying again.

    Where the share a of all requests was accepted, L accepted per second are L / a offered, with the retries of the refused
    and what clients cancel themselves; the configuration must bear those, so they must lie at or below the knee. Nothing is
    extrapolated beyond what was measured.
    """
    knee = find_knee(candidate.points)
    if knee.load_per_s is None:
        return Verdict(candidate, knee, fault=_fault(candidate, knee, demand, "no load measured keeps the SLO"))
    wanted = knee.load_per_s if demand.load_per_s is None else demand.load_per_s
    at = next((point for point in ascending(candidate.points) if point.offered_per_s >= min(wanted, knee.load_per_s)), None)
    share = (at.median("accepted_percent") or 0.0) / 100 if at else 0.0
    attained = (at.median("attainment_percent") or 0.0) / 100 if at else 0.0
    if not share or not attained:
        return Verdict(candidate, knee, fault="no request was accepted")
    if demand.load_per_s is None:
        accepted, offered = wanted * share, wanted
    else:
        accepted, offered = wanted, wanted / share
    if offered > knee.load_per_s * (1 + 1e-9):
        edge = "" if knee.found else ", the highest load measured"
        words = f"keeps the SLO only up to {knee.load_per_s:g} req/s{edge}; {wanted:g} accepted are {offered:.3g} with retries"
        return Verdict(candidate, knee, fault=_fault(candidate, knee, demand, words))
    cost = 1000 * candidate.replicas * demand.price_per_replica_hour / 3600 / accepted
    idle = 100 * max(0.0, 1 - offered / knee.load_per_s)
    return Verdict(candidate, knee, offered, accepted, 1 / attained - 1, idle, cost)


def choose(candidates: Sequence[Candidate], demand: Demand) -> Choice:
    """The least cost; of the same cost the highest knee; of the same knee the least TTFT; then the order given.

    A knee is known only to lie between two loads: what differs by less than that is the same.
    """
    verdicts = [judge(candidate, demand) for candidate in candidates]
    keeping = sorted((verdict for verdict in verdicts if verdict.keeps), key=_cost)
    if not keeping:
        return Choice(None, tuple((verdict, verdict.fault) for verdict in verdicts))
    cheapest = [verdict for verdict in keeping if _same_cost(verdict, keeping[0], demand)]
    farthest = max(cheapest, key=_room)
    roomiest = [verdict for verdict in cheapest if _same_room(verdict, farthest)]
    winner = min(roomiest, key=_ttft_at_load)
    others: list[tuple[Verdict, str]] = []
    for verdict in keeping:
        if verdict is winner:
            continue
        if verdict in roomiest:
            others.append((verdict, _slower(verdict, winner)))
        else:
            others.append((verdict, _narrower(verdict, farthest) if verdict in cheapest else _dearer(verdict, keeping[0])))
    others += [(verdict, verdict.fault) for verdict in verdicts if not verdict.keeps]
    return Choice(winner, tuple(others))


def judged_point(verdict: Verdict) -> AtLoad | None:
    """The load measured at, or next above, the judged one."""
    offered = min(verdict.offered_per_s or 0.0, verdict.knee.load_per_s or 0.0)
    return next((point for point in ascending(verdict.candidate.points) if point.offered_per_s >= offered * (1 - 1e-9)), None)


def _ttft_at_load(verdict: Verdict) -> float:
    point = judged_point(verdict)
    ttft = point.median("ttft_p95_ms") if point else None
    return float("inf") if ttft is None else ttft


def _cost(verdict: Verdict) -> float:
    return verdict.cost_per_1000 or 0.0


def _room(verdict: Verdict) -> float:
    return verdict.knee.load_per_s or 0.0


def _same_cost(dearer: Verdict, cheaper: Verdict, demand: Demand) -> bool:
    """Where each is judged at its own knee, the dearer one's may lie as high as the next load, and its cost so much lower."""
    least = _cost(dearer)
    if demand.load_per_s is None:
        least *= _room(dearer) / (dearer.knee.broken_per_s or _room(dearer))
    return _cost(dearer) <= _cost(cheaper) * (1 + SAME) or least < _cost(cheaper) * (1 - 1e-9)


def _same_room(nearer: Verdict, farther: Verdict) -> bool:
    return _room(nearer) >= _room(farther) * (1 - SAME) or (nearer.knee.broken_per_s or 0.0) > _room(farther)


def _dearer(loser: Verdict, best: Verdict) -> str:
    cost, least = _cost(loser), _cost(best)
    return f"keeps the SLO at {cost / least:.2f} times the cost ({short(cost, 4)} against {short(least, 4)} per 1,000 accepted)"


def _narrower(loser: Verdict, farthest: Verdict) -> str:
    return f"same cost, less room: knee at {_room(loser):g} against {_room(farthest):g} req/s"


def _slower(loser: Verdict, winner: Verdict) -> str:
    mine, its = _room(loser), _room(winner)
    knees = "" if mine == its else f" as far as measured ({_bracket(loser)} and {_bracket(winner)} req/s)"
    ttfts = f"{_ttft_at_load(loser):.0f} against {_ttft_at_load(winner):.0f} ms"
    return f"same cost, same knee{knees}; TTFT p95 {ttfts}{_certainty(loser, winner)}"


def _bracket(verdict: Verdict) -> str:
    knee = verdict.knee
    return f"{knee.load_per_s:g}" if knee.broken_per_s is None else f"{knee.load_per_s:g}–{knee.broken_per_s:g}"


def _certainty(loser: Verdict, winner: Verdict) -> str:
    points = judged_point(loser), judged_point(winner)
    a, b = (point.values("ttft_p95_ms") if point else () for point in points)
    if not a or not b:
        return ""
    return {None: " (one run: cannot tell)", True: "", False: " (within the spread)"}[difference(a, b).real]


def _fault(candidate: Candidate, knee: Knee, demand: Demand, words: str) -> str:
    broken = next((point for point in ascending(candidate.points) if point.offered_per_s == knee.broken_per_s), None)
    if broken is None:
        return words
    share = f"{broken.median('attainment_percent') or 0.0:.0f} % within the SLO"
    return f"{words}; at {knee.broken_per_s:g} req/s: {', '.join((share, *broken_targets(broken, demand.slo)))}"
