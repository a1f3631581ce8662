"""SLOs as written on the command line."""

from __future__ import annotations

import pytest

from bench.analysis.slo_text import parse_slo
from bench.analysis_cli import SLO_DEFAULT
from bench.slo import Slo


def test_targets_are_read() -> None:
    assert parse_slo("ttft_ms=2000, itl_p95_ms=200") == Slo(ttft_ms=2000.0, itl_p95_ms=200.0)
    assert parse_slo(SLO_DEFAULT).ttft_ms == 2000.0


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("tfft=1", "there are ttft_ms=…"),
        ("ttft_ms", "no target"),
        ("ttft_ms=soon", "no number"),
        ("ttft_ms=-1", "positive"),
        ("ttft_ms=nan", "positive"),
        ("ttft_ms=1,ttft_ms=2", "twice"),
        ("ttft=5", "'ttft=5' is no target"),
        ("", "at least one"),
    ],
)
def test_what_is_wrong_is_named(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_slo(text)
