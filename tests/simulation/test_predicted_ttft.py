"""The forecast knows what the scheduler does: short prompts pass longer ones, and nothing is scheduled before the running step ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import replica.engine
from bench.drills.calibration import shapes
from bench.simulator.burst import TWO_CORES
from bench.simulator.setup import Setup
from bench.simulator.slo import Slo
from bench.simulator.world import Layout
from replica.contract.messages import LoadReport


def mixed() -> dict[str, Any]:
    """400 requests of 24 to 1,200 tokens on one engine, near what it can do, its steps 20 % noisy."""
    return Setup(layout=Layout(replicas=1), profile=TWO_CORES, kv="production", noise=0.2).run(shapes(400, 4.5, 0), Slo())


def test_predictions_are_sharp_and_a_router_that_believes_in_order_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half is the negative control of the first."""
    knows = mixed()
    report = replica.engine.load_report

    def in_order(*arguments: Any, **named: Any) -> LoadReport:
        return msgspec.structs.replace(report(*arguments, **named), short_prefill_tokens=None)

    monkeypatch.setattr(replica.engine, "load_report", in_order)
    believes = mixed()
    assert believes["ttft_p95_s"] == knows["ttft_p95_s"], "the engine does the same, only what is expected differs"
    assert knows["ttft_pinball_s"] < 0.9 * believes["ttft_pinball_s"]
    assert knows["ttft_median_error"] < 0.17
