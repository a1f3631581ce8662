"""What `explain` says of each point of a result, as lines."""

from __future__ import annotations

from collections.abc import Sequence

from bench.analysis.evidence import evidence_of
from bench.analysis.rules import Finding, explain
from bench.request_log import RequestRow
from bench.result import ResultFile

NOTHING = "no bound shows: neither limits, memory, admission nor the client held this load back"


def findings_of(result: ResultFile, index: int, rows: Sequence[RequestRow]) -> tuple[Finding, ...]:
    cores = result.machine.get("cores")
    return explain(evidence_of(result.points, index, rows, cores if isinstance(cores, int) else None))


def lines_of(findings: Sequence[Finding]) -> list[str]:
    """The likeliest bound first, each with its evidence and what to change."""
    if not findings:
        return [NOTHING]
    words = ("likely bound", *("also seen" for _ in findings[1:]))
    return [f"{word}: {each.bound}. {each.evidence}. Try: {each.advice}." for word, each in zip(words, findings, strict=True)]
