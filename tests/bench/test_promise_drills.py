"""What the drills of promises, predictions and repeated kills judge: what they must find is planted."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from bench.drills import calibration, failover, rounds, saturation
from bench.drills.calibration import Seen
from bench.drills.failover import Failover
from bench.drills.readings import Reading, twin
from bench.drills.saturation import Saturation, Stretch
from bench.record import Outcome, RequestRecord
from bench.result import Metric
from bench.simulator import tables
from bench.simulator.cost import Profile
from replica.contract.messages import StepTimeCoefficients

PROFILE = Profile(
    step_time=StepTimeCoefficients(0.01, 0.0006, 0.0005, 0.0),
    max_num_batched_tokens=512,
    max_num_seqs=32,
    block_size=16,
    pool_blocks=2000,
    max_model_len=8192,
    step_slo_s=0.25,
)


def failed(metrics: tuple[Metric, ...]) -> list[str]:
    return [metric.name for metric in metrics if metric.holds is False]


def answered(ttft_s: float, outcome: Outcome = Outcome.COMPLETED) -> RequestRecord:
    return RequestRecord(0.0, end_s=ttft_s + 0.1, chunk_times_s=array("d", [ttft_s]), chunk_tokens=array("I", [1]), outcome=outcome)


def test_promises_that_were_broken_or_bought_by_refusing_are_found() -> None:
    shed = RequestRecord(0.0, outcome=Outcome.SHED)
    once = Stretch(1.0, 100.0, (answered(1.0),) * 100, (1.5,) * 100)

    def judged(records: list[RequestRecord]) -> list[str]:
        twice = Stretch(2.0, 100.0, tuple(records), (1.5,) * len(records))
        return failed(saturation.report(Saturation({64: 0.1}, 1.0, once, twice), {}).metrics)

    assert judged([answered(1.4)] * 98 + [answered(1.6)] * 2 + [shed] * 100) == []
    assert judged([answered(1.4)] * 96 + [answered(1.6)] * 4 + [shed] * 100) == ["kept.twice"]
    assert judged([answered(1.4)] * 90 + [shed] * 110) == ["goodput.twice_over_once"]
    assert judged([answered(1.4)] * 98 + [answered(0.1, Outcome.ERROR)] + [shed] * 100) == ["failed"]


def test_rounds_count_what_was_lost_in_any_and_those_that_were_not_run() -> None:
    one = answered(0.5)
    good = Failover((one,), (one,), (), 0.2, 0.1, 1, 5.0)
    assert failed(rounds.report([good] * 3, 3, {}).metrics) == []
    assert failed(rounds.report([good] * 2, 3, {}).metrics) == ["rounds", "rounds_with_moves"]
    lost = replace(good, disturbed=(answered(0.5, Outcome.ERROR),))
    assert failed(rounds.report([good, lost, good], 3, {}).metrics) == ["lost"]
    still = replace(good, moved_after_s=None)
    assert failed(rounds.report([good, still, good], 3, {}).metrics) == ["rounds_with_moves"], "a kill that moved nothing shows nothing"


def test_each_of_two_hundred_streams_has_a_prompt_of_its_own() -> None:
    bodies = [call.body for call in failover.calls(16, 200)]
    assert len(set(bodies)) == 200
    assert [call.body for call in failover.calls(16)] == bodies[:24]


def decision(actual_s: float, verdict: str = "admitted", number: int = 0, at_s: float = 0.0) -> dict[str, object]:
    place = {"replica": "r0", "new_tokens": 100, "ttft_s": 0.5, "ttft_p90_s": 0.9, "ttft_p98_s": 0.98, "ttft_uncalibrated_s": 0.4}
    return {
        "request_id": f"cmpl-{number}",
        "at_s": at_s,
        "verdict": verdict,
        "replica": "r0",
        "prompt_tokens": 100,
        "candidates": [place | {"replica": "r1", "ttft_s": 9.0}, place],
        "actual": {"ttft_s": actual_s},
    }


def readings(factor: float = 1.0) -> tuple[Reading, ...]:
    """Steps took `factor` of what was foreseen."""
    return tuple(Reading(at_s, PROFILE, busy_s=at_s * factor, foreseen_s=at_s) for at_s in (0.0, 100.0))


def test_predictions_are_judged_by_how_often_they_held(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = calibration.shapes(200, 2.0, 0)
    simulated = calibration.simulated(twin(readings()), trace)
    monkeypatch.setattr(calibration, "simulated", lambda *_: simulated)  # once is enough
    monkeypatch.setattr(calibration, "outside_s", lambda _: 0.0)
    real = tuple(answered(simulated["ttft_p50_s"] * 1.05) for _ in range(180)) + tuple(answered(simulated["ttft_p95_s"]) for _ in range(20))

    def judged(times_s: list[float], records: tuple[RequestRecord, ...] = real) -> list[str]:
        decisions = tuple(decision(each) for each in times_s)
        names = failed(calibration.report(Seen(0.0, records, decisions, readings()), trace, {}).metrics)
        return [name for name in names if name not in ("median_error", "pinball")]  # these times are no real ones

    calibrated = [(i + 0.5) / 200 for i in range(200)]
    assert judged(calibrated) == []
    assert "coverage.0.5.all" in judged([0.4] * 200)
    assert "coverage.0.98.<=128" in judged([2.0] * 10 + calibrated[:190])
    assert "predictions" in judged(calibrated[:150])
    slow = tuple(replace_ttft(record, 1.5) for record in real)
    assert judged(calibrated, slow) == ["simulated_ttft_off.p50", "simulated_ttft_off.p95"]


def replace_ttft(record: RequestRecord, factor: float) -> RequestRecord:
    assert record.ttft_s is not None
    return answered(record.ttft_s * factor)


def named(number: int, record: RequestRecord) -> RequestRecord:
    record.answer.id = f"cmpl-{number}"
    return record


def test_the_twin_gets_the_requests_when_the_router_got_them() -> None:
    trace = calibration.shapes(3, 2.0, 0)
    decisions = (decision(0.5, number=0, at_s=12.5), decision(0.5, number=2, at_s=11.0))
    records = tuple(named(number, answered(0.6)) for number in range(3))
    came = calibration.as_it_came(Seen(10.0, records, decisions, ()), trace)
    assert [one.arrival_s for one in came] == sorted([2.5, 1.0, trace[1].arrival_s]), "who was not seen came when it was due"
    assert next(one for one in came if one.arrival_s == 1.0).prompt_tokens == trace[2].prompt_tokens


def test_what_a_request_spends_outside_of_the_router_is_the_median_of_pairs() -> None:
    records = tuple(named(number, answered(ttft_s)) for number, ttft_s in enumerate((1.0, 2.0, 3.0, 9.0)))
    decisions = (decision(0.9, number=0), decision(1.8, number=1), decision(2.7, number=2) | {"actual": None}, decision(5.0, number=3))
    assert calibration.outside_s(Seen(0.0, records, decisions, ())) == pytest.approx(0.2)
    assert calibration.outside_s(Seen(0.0, records, (), ())) == 0.0


def test_a_twin_of_a_machine_that_was_slow_is_slow() -> None:
    trace = calibration.shapes(100, 2.0, 0)
    usual, slow = (calibration.simulated(twin(readings(factor)), trace) for factor in (1.0, 1.3))
    assert slow["ttft_p50_s"] > 1.3 * usual["ttft_p50_s"]


def test_what_was_refused_or_has_no_outcome_is_no_prediction() -> None:
    met = calibration.journeys([decision(0.5), decision(0.5, "refused"), decision(0.5) | {"actual": None}])
    assert len(met) == 1
    assert met[0].promise is not None and met[0].promise.quantiles_s == (0.5, 0.9, 0.98), "of the replica that was chosen"


def simulated_row(label: str, goodput: float, fifths: list[float], covered: float = 0.98) -> dict[str, object]:
    lengths = {"<=512": {"n": 2500, "0.5": 0.5, "0.9": 0.9, "0.98": covered}, "<=128": {"n": 9, "0.5": 0.0, "0.9": 0.0, "0.98": 0.0}}
    return {
        "label": label,
        "speed": 1.6,
        "goodput_fraction": goodput,
        "token_goodput_fraction": goodput,
        "ttft_p95_s": 2.0,
        "shed_by_length_fifth": fifths,
        "ttft_coverage_by_length": lengths,
    }


def test_a_table_says_which_of_its_promises_are_broken() -> None:
    def judged(table: str, *rows: dict[str, object]) -> list[str]:
        return [name.split(": ")[-1] for name in failed(tables.metrics_of(table, rows))]

    even = [0.1] * 5
    assert judged("admission", simulated_row(tables.SCALED, 0.9, even)) == []
    assert judged("admission", simulated_row(tables.SCALED, 0.87, even)) == ["goodput"]
    assert judged("admission", simulated_row(tables.SCALED, 0.9, [0.0, 0.0, 0.0, 0.02, 0.2])) == ["worst fifth of lengths over the mean"]
    assert judged("admission", simulated_row(tables.SCALED, 0.9, even, 0.96)) == ["<=512 tokens, within the 0.98 quantile"]
    pair = (simulated_row(tables.WRONG, 0.80, even), simulated_row(tables.NOISY, 0.90, even))
    assert judged("admission", *pair) == ["goodput"], "0.80 is enough, and too little against 0.90"
    capped = (simulated_row("predicted, flat", 0.94, even), simulated_row(f"{tables.STATIC} 9, flat", 0.95, even))
    assert judged("admission", *capped) == ["goodput in tokens"], "as many tokens as by the best static cap"
    others = (simulated_row(tables.OURS, 0.90, even), simulated_row("lmetric", 0.895, even))
    assert judged("production", *others) == ["goodput over the best other's"]
    assert judged("policies", simulated_row("lmetric", 0.99, even)) == ["goodput"], "better than published is another baseline"
