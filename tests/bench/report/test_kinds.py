"""A page of a mixed workload tells its kinds of requests apart."""

from __future__ import annotations

from msgspec import structs

from bench.record import Outcome
from bench.report.document import sections
from bench.report.kinds import by_kind
from tests.bench.made_up_results import card, point, result_file, rows_for


def test_each_kind_has_its_own_figures() -> None:
    chat = rows_for(0, 4, shed=1)
    agents = [structs.replace(row, group="agent", ttft_ms=900.0, e2e_ms=1_200.0, accepted=i == 0) for i, row in enumerate(rows_for(0, 4))]
    agents[1] = structs.replace(agents[1], outcome=Outcome.CANCELLED, ttft_ms=1.0)
    agents[2] = structs.replace(agents[2], outcome=Outcome.WRONG, ttft_ms=1.0)
    chat[4] = structs.replace(chat[4], group="chat")
    grid = by_kind([*chat, *agents])
    assert grid is not None
    assert grid.rows[0] == ("agent", "4", "33.3", "25", "0", "900", "900", "25", "1,200"), "a wrong or cancelled answer lends no speed"
    assert grid.rows[1] == ("chat", "5", "80", "0", "20", "101", "103", "25", "303")
    assert by_kind(chat) is None, "one kind is the scorecard itself"


def test_a_kind_without_an_answer_has_no_latency() -> None:
    lost = [structs.replace(row, group="long", outcome=Outcome.TIMEOUT, accepted=False) for row in rows_for(0, 2)]
    grid = by_kind([*rows_for(0, 2), *lost])
    assert grid is not None and grid.rows[1] == ("long", "2", "0", "100", "0", "–", "–", "–", "–")
    gone = [structs.replace(row, group="agent", outcome=Outcome.CANCELLED, accepted=False) for row in rows_for(0, 2)]
    grid = by_kind([*rows_for(0, 2), *gone])
    assert grid is not None and grid.rows[0][2] == "–", "of nothing that was judged there is no share"


def test_the_page_has_them_only_where_there_are_several() -> None:
    mixed = [*rows_for(0, 3), *(structs.replace(row, group="agent") for row in rows_for(0, 3)), *rows_for(1, 3)]
    result = result_file([point([card(1.0)]), point([card(2.0)])])
    (found,) = (section for section in sections(result, mixed, []) if section.title == "By kind of request")
    assert [block for block in found.blocks if isinstance(block, str)] == ["1 req/s:"], "of the second point there is one kind"
    assert not any(section.title == "By kind of request" for section in sections(result, rows_for(0, 3), []))
