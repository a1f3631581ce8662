"""The four questions a choice must answer before it is trusted."""

from __future__ import annotations

from dataclasses import dataclass

from bench.analysis.at_load import burst_of
from bench.analysis.choice import Verdict, judged_point
from bench.analysis.targets import broken_targets
from bench.slo import Slo

REPEATABLE_PERCENT = 10.0  # spread of goodput over the runs
KV_TIGHT_PERCENT = 95.0
PREEMPTED_PERCENT = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """`good` None: not measured."""

    question: str
    answer: str
    good: bool | None


def checklist(verdict: Verdict, slo: Slo, context_tokens: int | None = None) -> tuple[Answer, ...]:
    return (_highest(verdict), _burst(verdict, slo), _memory(verdict, context_tokens), _repeatable(verdict))


def _highest(verdict: Verdict) -> Answer:
    question = "What is the highest traffic within the p95 targets?"
    knee = verdict.knee
    if knee.load_per_s is None:
        return Answer(question, str(knee), False)
    edge = knee.edge(f"; at {knee.broken_per_s or 0:g} they break")
    if knee.unsteady:
        return Answer(question, f"{knee.load_per_s:g} req/s{edge}, if that can be told at all: {knee.unsteady}", None)
    return Answer(question, f"{knee.load_per_s:g} req/s{edge}", True)


def _burst(verdict: Verdict, slo: Slo) -> Answer:
    question = "What happens in a burst?"
    point = burst_of(verdict.candidate.points)
    if point is None:
        return Answer(question, "not measured", None)
    shed = point.median("shed_percent") or 0.0
    failed = point.median("error_percent") or 0.0
    late = tuple(each for each in broken_targets(point, slo) if ">" in each)
    if failed >= PREEMPTED_PERCENT:
        return Answer(question, f"failures: {failed:.1f} % of the requests ended in errors", False)
    if late:
        return Answer(question, f"spike: {', '.join(late)}; {shed:.0f} % shed", False)
    ttft = point.median("ttft_p95_ms")
    kept = f"TTFT p95 {ttft:.0f} ms" if ttft is not None else "no answer at all"
    if shed >= PREEMPTED_PERCENT:
        words = f"rejection: {shed:.0f} % shed with Retry-After, the accepted stay within the targets ({kept})"
        return Answer(question, words, ttft is not None)
    return Answer(question, f"bounded queue: everything is served within the targets ({kept})", True)


def _memory(verdict: Verdict, context_tokens: int | None) -> Answer:
    context = f" with contexts up to {context_tokens} tokens" if context_tokens else ""
    question = f"Are preemption and KV pressure stable{context}?"
    point = judged_point(verdict)
    preempted = point.highest("preemptions") if point else None
    kv = point.highest("kv_use_max_percent") if point else None
    if point is None or (preempted is None and kv is None):
        return Answer(question, "the server does not say", None)
    at = f"at {point.offered_per_s:g} req/s"
    seen = [f"{preempted:.0f} preemptions" if preempted is not None else "preemptions not told"]
    seen.append(f"KV pool at most {kv:.0f} % full" if kv is not None else "KV use not told")
    good = (preempted or 0.0) == 0 and (kv is None or kv < KV_TIGHT_PERCENT)
    return Answer(question, f"{'yes' if good else 'no'}: {', '.join(seen)} {at}", good)


def _repeatable(verdict: Verdict) -> Answer:
    question = "Is it repeatable?"
    point = judged_point(verdict)
    runs = len(point.runs) if point else 0
    if point is None or runs < 2:
        return Answer(question, f"cannot tell from {runs} run{'s' * (runs != 1)}", None)
    spreads = {name: point.spread_percent(name) for name in ("goodput_per_s", "ttft_p95_ms")}
    goodput, ttft = spreads["goodput_per_s"], spreads["ttft_p95_ms"]
    words = [f"{name} ±{spread / 2:.1f} %" for name, spread in (("goodput", goodput), ("TTFT p95", ttft)) if spread is not None]
    good = goodput is not None and goodput <= REPEATABLE_PERCENT
    return Answer(question, f"{'yes' if good else 'no'}: {runs} runs, {', '.join(words) or 'nothing completed'}", good)
