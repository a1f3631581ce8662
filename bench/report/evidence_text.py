"""What `explain` says of each point of a result, as lines."""

from __future__ import annotations

from collections.abc import Sequence

from bench.analysis.evidence import Evidence, evidence_of
from bench.analysis.next_steps import next_steps
from bench.analysis.rules import explain
from bench.analysis.slo_verdict import verdict
from bench.request_log import RequestRow
from bench.result import ResultFile

NOTHING = "no bound shows: neither limits, memory, admission nor the client held this load back"
UNTOLD = "no bound shows in the client, and only it could be judged: the server tells no metrics of limits, memory or admission"
NO_BOUND = "no bound is seen. Measure next: "


def lines_of(result: ResultFile, index: int, rows: Sequence[RequestRow]) -> list[str]:
    """Of point `index`: whether its SLO was kept, then the likeliest bound first, or what to measure next where none shows."""
    cores = result.machine.get("cores")
    return lines(evidence_of(result.points, index, rows, cores if isinstance(cores, int) else None))


def lines(evidence: Evidence) -> list[str]:
    """Each bound with its evidence and what to change. Where the SLO broke there is one, or a way to find it."""
    findings = explain(evidence)
    told = [f"{verdict(evidence)}."]
    if not findings:
        return [*told, f"{NO_BOUND}{'; '.join(next_steps(evidence))}." if evidence.broken else NOTHING if evidence.told else UNTOLD]
    words = ("likely bound", *("also seen" for _ in findings[1:]))
    return told + [f"{word}: {each.bound}. {each.evidence}. Try: {each.advice}." for word, each in zip(words, findings, strict=True)]
