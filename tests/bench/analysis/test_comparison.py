"""What is said of two results: real, within the spread, not to be told, not to be compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.analysis.candidates import candidates_of
from bench.analysis.comparison import NotComparable, Says, compare, says
from bench.analysis.interval import Difference
from bench.point import Served
from bench.slo import Slo
from tests.bench.made_up_results import FACTS, card, point, result_file


def said(a: tuple[float, ...], b: tuple[float, ...]) -> Says:
    """Of TTFT p95, lower is better."""
    one = result_file([point([card(ttft_ms=ttft) for ttft in a])])
    other = result_file([point([card(ttft_ms=ttft) for ttft in b])])
    (pair,) = compare(one, other, ["ttft_p95_ms"])
    (row,) = pair.rows
    return row.says


def test_loads_that_match_are_compared_across_workloads_when_forced() -> None:
    other = replace(FACTS, name="agent", hash="ffff")
    a = result_file([point([card()], rate=1.0), point([card()], rate=2.0)])
    b = result_file([point([card()], rate=1.0, facts=other), point([card()], rate=3.0, facts=other)])
    with pytest.raises(NotComparable, match=r"different workloads: chat .* against agent .*--force"):
        compare(a, b)
    assert [pair.label for pair in compare(a, b, force=True)] == ["baseline, chat, 1 req/s"]
    both = result_file([*b.points, point([card()], rate=1.0)])
    assert [pair.notes for pair in compare(a, both)] == [()], "the control: where the same workload is there it is taken"


def test_a_difference_beyond_the_spread_has_a_direction() -> None:
    assert said((100, 101, 99), (200, 202, 198)) is Says.WORSE
    assert said((200, 202, 198), (100, 101, 99)) is Says.BETTER
    assert said((100, 140, 60), (110, 150, 70)) is Says.SAME
    assert said((100,), (200, 201)) is Says.CANNOT_TELL


def test_a_figure_that_is_neither_good_nor_bad() -> None:
    rose = Difference(1.0, 2.0, 0.5, 1.5)
    assert (says(rose, "higher"), says(rose, "lower"), says(rose, "")) == (Says.BETTER, Says.WORSE, Says.HIGHER)
    assert says(Difference(2.0, 1.0, -1.5, -0.5), "") is Says.LOWER


def test_different_questions_are_refused_unless_forced() -> None:
    a = result_file([point([card()])])
    other_work = result_file([point([card()], facts=replace(FACTS, hash="ffff"))])
    with pytest.raises(NotComparable, match=r"different workloads.*--force"):
        compare(a, other_work)
    other_load = result_file([point([card()], rate=2.0)])
    with pytest.raises(NotComparable, match="different loads: 1 req/s against 2 req/s"):
        compare(a, other_load)
    (pair,) = compare(a, other_work, force=True)
    assert any("different workloads" in note for note in pair.notes)
    two = result_file([point([card()], rate=1.0), point([card()], rate=2.0)])
    with pytest.raises(NotComparable, match="no load was measured in both"):
        compare(two, result_file([point([card()], rate=3.0)]))


def test_points_are_paired_by_load_and_differences_around_them_noted() -> None:
    a = result_file([point([card()], rate=1.0), point([card(ttft_ms=300)], rate=2.0)])
    b = result_file([point([card(ttft_ms=400)], rate=2.0, label="new", slo=Slo(ttft_ms=1.0))], cores=4)
    (pair,) = compare(a, b, ["ttft_p95_ms"])
    assert (pair.rows[0].difference.a, pair.rows[0].difference.b) == (300, 400)
    assert any("cores differs: 2 against 4" in note for note in pair.notes)
    assert any("different SLOs" in note for note in pair.notes)


def test_an_unknown_metric_gets_the_list() -> None:
    a = result_file([point([card()])])
    with pytest.raises(ValueError, match=r"unknown metric 'tffft'; there are offered_per_s, .*goodput_per_s"):
        compare(a, a, ["tffft"])


def test_candidates_are_told_apart_by_label_or_settings() -> None:
    eight = Served("rantang", "0.1", "rantang serve", {"max_num_seqs": "8"}, 2)
    found = candidates_of([point([card()]), point([card()], rate=2.0), point([card()], served=eight)])
    assert [each.name for each in found] == ["baseline (replicas=1)", "baseline (max_num_seqs=8, replicas=2)"]
    assert [len(each.points) for each in found] == [2, 1]
    assert found[1].replicas == 2
    named = candidates_of([point([card()]), point([card()], label="max_num_seqs=8", served=eight)])
    assert [each.name for each in named] == ["baseline", "max_num_seqs=8"]
    with pytest.raises(ValueError, match="different workloads"):
        candidates_of([point([card()]), point([card()], facts=replace(FACTS, hash="ffff"))])
    with pytest.raises(ValueError, match="different SLOs"):
        candidates_of([point([card()]), point([card()], slo=Slo(e2e_ms=1.0))])
    with pytest.raises(ValueError, match="nothing to choose"):
        candidates_of([])


def test_points_of_other_workloads_are_never_paired() -> None:
    a, e = FACTS, replace(FACTS, name="e", hash="eeee")
    points = [point([card()], facts=a), point([card()], facts=e), point([card()], rate=2.0, facts=a)]
    pairs = compare(result_file(points), result_file(points))
    assert [pair.label for pair in pairs] == ["baseline, chat, 1 req/s", "baseline, e, 1 req/s", "baseline, chat, 2 req/s"]
    assert not any(pair.notes for pair in pairs)
    changed = [replace(each, workload=replace(each.workload, hash="ffff")) for each in points]
    assert len(compare(result_file(points), result_file(changed), force=True)) == 3
    with pytest.raises(NotComparable, match="different workloads"):
        compare(result_file(points), result_file(changed))
