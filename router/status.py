"""What /health, /ready, /v1/models and the autoscaler are told: derived on demand, never maintained."""

from __future__ import annotations

import msgspec

from replica.contract.messages import EngineLimits
from router.policy.fleet import backlog_s
from router.policy.prefix_index import ENTRY_BYTES
from router.ports import PoolFacts, PoolStatus, Total
from router.switchboard import Switchboard

_LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_blocks", "block_size", "step_slo_s")
SHED_REASONS = ("queue_time", "queue_time_waited", "ttft", "ttft_waited", "tpot", "tpot_waited", "queue_full")


def pool_facts(board: Switchboard, limits: EngineLimits | None, named: tuple[str, str]) -> PoolFacts:
    """`limits` are the last seen; `named` is (model, revision) while no replica has told its own."""
    pool = board.fleet.pool()
    shown = pool.limits if pool is not None else limits
    model, revision = named if pool is None else (pool.model, pool.revision)
    return PoolFacts(shown, model, revision, shown.block_size if shown is not None else 16)


def pool_status(board: Switchboard, limits: EngineLimits | None, named: tuple[str, str], now: float, *, stopping: bool) -> PoolStatus:
    """`limits` and `named` as for `pool_facts`."""
    known = board.fleet.all()
    facts = pool_facts(board, limits, named)
    blocks = sum(one.view.limits.num_blocks for one in known)
    unused = sum(one.view.load.free_blocks + one.view.load.evictable_blocks for one in known)
    reason = ""
    if stopping:
        reason = "stopping"
    elif not board.fleet.routable():
        reason = f"none of {len(known)} connected replicas is healthy" if known else "no replica is connected"
    return PoolStatus(
        ready=not reason,
        live=board.is_live(now),
        replicas=len(known),
        limits=facts.limits,
        model=facts.model,
        revision=facts.revision,
        block_size=facts.block_size,
        reason=reason,
        running=sum(one.view.load.running for one in known),
        waiting=sum(one.view.load.waiting + one.view.claims.requests for one in known),
        queued=board.reception.queue.depth,
        kv_usage=1.0 - unused / blocks if blocks else 0.0,
        moves=board.traffic.tally.moves,
        preemptions=sum(one.view.load.preemptions for one in known),
    )


def flat_stats(board: Switchboard, now: float) -> dict[str, float]:
    """Numbers for autoscaling and for who wants to look inside."""
    tally, fleet, queue = board.traffic.tally, board.fleet, board.reception.queue
    stats = {
        "replicas": float(len(fleet.all())),
        "replicas_routable": float(len(fleet.routable())),
        "backlog_s": backlog_s(fleet, now) + queue.work_s,
        "queued_requests": float(queue.depth),
        "queued_tokens": float(queue.tokens),
        "in_flight": float(len(board.traffic.dispatches)),
        "attempts": float(len(board.traffic.attempts)),
        "arrived": float(tally.arrived),
        "ended": float(tally.ended),
        "moves": float(tally.moves),
        "retries": float(tally.retries),
        "resyncs": float(fleet.index.resyncs),
        "index_entries": float(fleet.index.entries),
        "hits_predicted_tokens": float(fleet.hits_predicted_tokens),
        "hits_actual_tokens": float(fleet.hits_actual_tokens),
        "sheds": float(sum(tally.rejected.get(reason, 0) for reason in SHED_REASONS)),
    }
    return stats | {f"rejected_{reason}": float(count) for reason, count in sorted(tally.rejected.items())}


def pool_totals(board: Switchboard, now: float) -> tuple[Total, ...]:
    """What is counted behind the API, for its page of metrics."""
    fleet, tally = board.fleet, board.traffic.tally
    found = [
        Total("hit_tokens_predicted", fleet.hits_predicted_tokens),
        Total("hit_tokens_actual", fleet.hits_actual_tokens),
        Total("prefix_index_resyncs", fleet.index.resyncs),
        Total("prefix_index_bytes", fleet.index.entries * ENTRY_BYTES, is_gauge=True),
        Total("retries", tally.retries),
        Total("queued_tokens", board.reception.queue.tokens, is_gauge=True),
        Total("routers", fleet.routers, is_gauge=True),
    ]
    for (what, length, quantile), count in sorted(fleet.coverage.counts.items()):
        labels = (("of", what), ("length", length), ("quantile", f"{quantile:g}"))
        found.append(Total("predictions", count.total, labels))
        found.append(Total("predictions_within", count.within, labels))
    found += [Total("untrue_reports", count, (("reason", reason),)) for reason, count in sorted(fleet.lies.counts.items())]
    if fleet.index.stale:
        found.append(Total("untrue_reports", fleet.index.stale, (("reason", "sequence"),)))
    for known in fleet.all():
        label = (("replica", known.view.incarnation.replica_id),)
        found.append(Total("replica_weight", known.health.weight(now) if known.is_routable else 0.0, label, is_gauge=True))
        found.append(Total("replica_report_age_seconds", max(0.0, now - known.view.reported_s), label, is_gauge=True))
        for name, value in msgspec.structs.asdict(known.view.load.step_time).items():
            found.append(Total("replica_step_time_seconds", value, (*label, ("coefficient", name)), is_gauge=True))
        found.append(Total("replica_step_time_spread", known.view.load.step_spread, label, is_gauge=True))
        found.append(Total("replica_busy_seconds", known.view.load.busy_s, label))
        found.append(Total("replica_foreseen_seconds", known.view.load.foreseen_s, label))
        for name in _LIMITS:
            limit = getattr(known.view.limits, name)
            if limit is not None:
                found.append(Total("replica_limit", limit, (*label, ("limit", name)), is_gauge=True))
    return tuple(found)
