"""The rules of `explain`: each looks at the evidence for one bound, and names it with the numbers it saw, or says nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.analysis.evidence import Evidence, mean
from bench.analysis.targets import REFUSED_PERCENT
from bench.lateness import lateness
from bench.quantiles import quantile

SAMPLES_MIN = 6  # fewer samples make no trend
KV_FREE_PERCENT = 80.0
KV_FULL_PERCENT = 97.0
KINDS_MAX = 3  # of failures that are named
ALONE = 1.5  # requests running at a time, on average: hardly anybody beside a prompt


@dataclass(frozen=True, slots=True)
class Finding:
    """`bound`: what limits. `evidence`: the numbers that say so. `advice`: what to change, one control at a time."""

    bound: str
    evidence: str
    advice: str


Rule = Callable[[Evidence], Finding | None]


def client_late(e: Evidence) -> Finding | None:
    """The client sent late or had no core left: what it measured is partly itself."""
    seen = lateness(e.figures)
    if not seen:
        return None
    return Finding("client", seen, "give the client a machine or a core of its own, or offer less, and measure again")


def failures(e: Evidence) -> Finding | None:
    """Answers that failed or contradict themselves: what is left says little of the rest."""
    share = e.figure("error_percent")
    if share is None or share < REFUSED_PERCENT:
        return None
    kinds = sorted(e.problems.items(), key=lambda pair: -pair[1])[:KINDS_MAX]
    seen = "".join(f"; {count} × {kind}" for kind, count in kinds)
    return Finding("failures", f"{share:.0f} % of {e.requests} requests failed{seen}", "the server's log first; then measure again")


def kv_pressure(e: Evidence) -> Finding | None:
    """Preemptions, or a pool too full for one more request of the average size, with requests waiting before it."""
    preempted, kv = e.figure("preemptions") or 0.0, e.figure("kv_use_max_percent")
    if preempted > 0.01 * max(1, e.requests):
        full = f", KV pool up to {kv:.0f} % full" if kv is not None else ""
        return Finding(
            "KV memory",
            f"{preempted:.0f} preemptions in {e.requests} requests{full}",
            "a larger KV pool (kv_cache_memory_bytes), fewer sequences (max_num_seqs), shorter contexts, or another replica",
        )
    held = [moment for moment in e.arriving if moment.waiting >= 1 and moment.kv_with_one_more >= KV_FULL_PERCENT]
    if len(e.arriving) >= SAMPLES_MIN and len(held) >= 0.3 * len(e.arriving):
        use, running = mean([moment.kv_use_percent for moment in held]), mean([moment.running for moment in held])
        return Finding(
            "KV memory",
            f"in {len(held)} of {len(e.arriving)} samples requests waited while {use:.0f} % of the KV pool was in use by"
            f" {running:.1f} running ones, and one more of their size did not fit",
            "a larger KV pool (kv_cache_memory_bytes), or another replica",
        )
    return None


def idle_while_waiting(e: Evidence) -> Finding | None:
    """Requests wait, memory is free, and hardly anybody runs."""
    most = max((moment.running for moment in e.arriving), default=0.0)
    waiting = [moment for moment in e.arriving if moment.waiting >= 1]
    idle = [moment for moment in waiting if moment.running <= 0.25 * most and moment.kv_use_percent < KV_FREE_PERCENT]
    if len(waiting) < SAMPLES_MIN or len(idle) < 0.3 * len(waiting):
        return None
    cpu = e.figure("server_cpu_cores")
    if cpu is not None and e.cores:
        where = "CPU" if cpu >= 0.85 * e.cores else "network or client"
        told = f"; the server used {cpu:.2f} of {e.cores} cores"
    else:
        where, told = "CPU, network or client", ""
    return Finding(
        where,
        f"in {len(idle)} of {len(waiting)} samples with requests waiting, at most a quarter of the {most:.0f} that ran before ran{told}",
        "look at the router's and the client's CPU, and at the link between router and replica",
    )


def waiting_grows(e: Evidence) -> Finding | None:
    """Waiting grows while memory is free: a limit of the scheduler, or what stands before it."""
    if e.at_once or len(e.arriving) < SAMPLES_MIN:
        return None
    third = len(e.arriving) // 3
    first = mean([moment.waiting for moment in e.arriving[:third]])
    last = mean([moment.waiting for moment in e.arriving[-third:]])
    kv = max(moment.kv_use_percent for moment in e.arriving)
    if last < first + 2 or last < 2 * first or kv >= KV_FREE_PERCENT:
        return None
    grew = f"waiting grew from {first:.1f} to {last:.1f} while at most {kv:.0f} % of the KV pool was in use"
    running = mean([moment.running for moment in e.arriving[-third:]])
    if e.sequences_max is not None and running >= 0.95 * e.sequences_max:
        return Finding(
            "sequence limit", f"{grew}, with all {e.sequences_max} sequences running", "more sequences (max_num_seqs), or another replica"
        )
    limit = f" of {e.sequences_max}" if e.sequences_max is not None else ""
    return Finding(
        "token budget, tokenizer or client",
        f"{grew}, with {running:.1f}{limit} sequences running",
        "a larger step (max_num_batched_tokens, inter_token_slo_ms) if prompts wait for it; else the router's CPU",
    )


def burst_queue(e: Evidence) -> Finding | None:
    """All was due at once, and did not keep the SLO: it waits for itself. The last first token came long after the first one."""
    done, waiting, ttft_ms = e.figure("completed_per_s"), e.figure("waiting_max"), e.figure("ttft_p95_ms")
    soonest_ms = min((ms for _, ms in e.ttft_by_prompt), default=None)
    queued = bool(waiting) or (soonest_ms is not None and (ttft_ms or 0.0) >= 2 * soonest_ms)
    if not e.at_once or not e.broken or not done or not queued:
        return None
    seen = [f"{e.requests} requests at once are {e.requests / done:.0f} s of work at the {done:.2f} responses/s that were served"]
    seen += [f"up to {waiting:.0f} waited"] if waiting else []
    seen += [f"the first token came after {ttft_ms:.0f} ms (p95)"] if ttft_ms is not None else []
    return Finding(
        "queue of the burst",
        "; ".join(seen),
        "more replicas to shorten it, or a shorter queue-time SLO (queue_time_slo_s) that refuses what would be late",
    )


def long_steps(e: Evidence) -> Finding | None:
    """Gaps above the target are far longer than most: steps that carry prompts, among those that do not."""
    (late, of), target_ms, middle_ms = e.late_gaps, e.slo.itl_p95_ms, e.figure("itl_p50_ms")
    if not e.broken or not of or late < 0.05 * of or not middle_ms or target_ms is None or target_ms < 3 * middle_ms:
        return None
    return Finding(
        "prompts beside running answers",
        f"half of all gaps are up to {middle_ms:.0f} ms, and in {late} of {of} answers one in twenty is above {target_ms:g} ms:"
        " a few steps are much longer",
        "smaller steps (max_num_batched_tokens, inter_token_slo_ms), weighed against time to first token",
    )


def prompts(e: Evidence) -> Finding | None:
    """TTFT grows on long prompts, and it is not the queue: their chunks wait for others, or they themselves take so long."""
    short, long = _short_and_long(e)
    kept = e.broken and e.slo.ttft_ms is not None and not e.late_prompts  # something else broke, and larger chunks may be why
    if not short or not long or kept:
        return None
    short_ms, long_ms = (quantile([ms for _, ms in part], 0.5) or 0.0 for part in (short, long))
    short_tokens, long_tokens = (quantile([float(tokens) for tokens, _ in part], 0.5) or 0.0 for part in (short, long))
    queue_ms = e.figure("queue_p50_ms") or 0.0
    chunked = e.budget_tokens is None or long_tokens > e.budget_tokens
    if not chunked or long_tokens < 2 * short_tokens or long_ms < 2 * short_ms or queue_ms > 0.5 * long_ms:
        return None
    seen = f"TTFT p50 {long_ms:.0f} ms with some {long_tokens:.0f} new prompt tokens, {short_ms:.0f} ms with about {short_tokens:.0f}"
    running = [moment.running for moment in e.arriving if moment.running]
    if running and mean(running) < ALONE:
        return Finding(
            "prefill",
            f"{seen}, with {mean(running):.1f} requests running at a time: the prompts' own computation",
            "a faster model, dtype or machine, shorter or shared prompts, or a target that grows with the prompt",
        )
    budget = f"; a step takes at most {e.budget_tokens}" if e.budget_tokens else ""
    return Finding(
        "chunk budget",
        f"{seen}{budget}",
        "a larger chunk (max_num_batched_tokens, long_prefill_token_threshold, inter_token_slo_ms), weighed against inter-token latency",
    )


def _short_and_long(e: Evidence) -> tuple[Sequence[tuple[int, float]], Sequence[tuple[int, float]]]:
    """The third with the shortest prompts and the one with the longest; of few answers those in time and those that were late."""
    if len(e.ttft_by_prompt) < 12:
        return (e.timely_prompts, e.late_prompts) if e.broken else ((), ())
    ordered = sorted(e.ttft_by_prompt)
    third = len(ordered) // 3
    return ordered[:third], ordered[-third:]


def admission(e: Evidence) -> Finding | None:
    """Against the next lower load: more is done, and the tail is much worse."""
    done, done_before = e.figure("completed_per_s"), e.calmer.get("completed_per_s")
    if not done or not done_before or done < 1.03 * done_before:
        return None
    worse = [
        f"{name} p95 {before:.0f} → {now:.0f} ms"
        for name, key in (("TTFT", "ttft_p95_ms"), ("inter-token", "itl_p95_ms"), ("end to end", "e2e_p95_ms"))
        if (before := e.calmer.get(key)) and (now := e.figure(key)) and now >= 1.5 * before
    ]
    if not worse:
        return None
    return Finding(
        "admission",
        f"against the next lower load {done_before:.2f} → {done:.2f} responses/s, but {', '.join(worse)}",
        "let in less: a shorter queue-time SLO, or fewer sequences",
    )


def refusals(e: Evidence) -> Finding | None:
    """More is offered than can be served in time, and the rest is refused."""
    shed, offered, done = e.figure("shed_percent"), e.figure("offered_per_s"), e.figure("completed_per_s")
    if e.at_once or not shed or shed < REFUSED_PERCENT or not offered:
        return None
    waiting = e.figure("waiting_max")
    waited = "" if waiting is None else f", with up to {waiting:.0f} waiting"
    return Finding(
        "load above what is served in time",
        f"{shed:.0f} % of {offered:.2f} req/s were refused, {done or 0.0:.2f} responses/s came{waited}",
        "another replica, less load, or a longer queue-time SLO (queue_time_slo_s) where clients can wait",
    )


def compute(e: Evidence) -> Finding | None:
    """The cores are busy: no setting gives much."""
    cpu = e.figure("server_cpu_cores")
    if cpu is None or not e.cores or cpu < 0.85 * e.cores:
        return None
    return Finding(
        "compute",
        f"the server used {cpu:.2f} of {e.cores} cores over the whole run",
        "a faster model or dtype, more cores, or another replica",
    )


# What makes the other figures doubtful comes first, then what stops work, then what delays it.
RULES: tuple[Rule, ...] = (
    failures,
    client_late,
    kv_pressure,
    idle_while_waiting,
    waiting_grows,
    burst_queue,
    long_steps,
    prompts,
    admission,
    refusals,
    compute,
)


def explain(evidence: Evidence) -> tuple[Finding, ...]:
    """Every bound that shows, the likeliest first; none when nothing does."""
    return tuple(finding for rule in RULES if (finding := rule(evidence)) is not None)
