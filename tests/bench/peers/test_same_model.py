"""Another token is forgiven only at a near tie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from bench import golden
from bench.golden import Golden, GoldenItem
from bench.mock_openai import Fault
from bench.peers import same_model
from bench.peers.peer import Prompts
from bench.peers.same_model import SameModel, count, gap_of_ids, gap_of_text
from tests.bench.mock_pair import StartPair

WORDS = (" zero", " one", " two", " three")
ITEM = GoldenItem(0, (5, 6), (0, 1, 2), (-0.1, -0.1, -0.1), (2.0, 0.1, 3.0, 4.0), "", ())


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS[i] for i in ids)


def test_the_gap_is_taken_where_the_texts_part() -> None:
    assert gap_of_text(ITEM, " zero one two", decode) is None
    assert gap_of_text(ITEM, "zero one two", decode) is None  # some servers strip
    assert gap_of_text(ITEM, " zero three", decode) == 0.1
    assert gap_of_text(ITEM, " three", decode) == 2.0
    assert gap_of_text(ITEM, " zero one two three", decode) == 4.0  # it should have ended


def test_a_word_that_goes_on_may_be_another_token() -> None:
    assert gap_of_text(ITEM, " zero ones", decode) == 0.1  # " ones" is no " one": the difference is there, not after it
    assert gap_of_text(ITEM, " zero one!", decode) == 3.0


def test_ids_tell_exactly() -> None:
    assert gap_of_ids(ITEM, [0, 1, 2]) is None
    assert gap_of_ids(ITEM, [0, 3, 2]) == 0.1 and gap_of_ids(ITEM, [0, 1]) == 3.0 and gap_of_ids(ITEM, [0, 1, 2, 3]) == 4.0


def test_counts() -> None:
    assert count([None, 0.1, 2.0, math.inf, math.nan]) == SameModel(5, equal=1, near_tie=1, different=2, failed=1)
    assert count([None, 0.1]).holds and not count([None, 2.0]).holds and not count([math.nan]).holds and not count([]).holds


async def test_a_server_of_another_model_is_seen(pair: StartPair) -> None:
    recorded = Golden(3, frozenset({9}), (ITEM,))
    by_text = Prompts(ask_ids=False)
    served = await pair()
    found = await same_model.check(f"http://127.0.0.1:{served.port}", recorded, by_text, decode)
    assert found == SameModel(1, 0, 0, different=1, failed=0)
    numbered = await same_model.check(f"http://127.0.0.1:{served.port}", recorded, by_text, lambda ids: "".join(f" t{i}" for i in ids))
    assert numbered.holds and numbered.equal == 1  # the control: the mock says t0 t1 t2


async def test_no_answer_is_no_proof(pair: StartPair) -> None:
    served = await pair(fault=Fault.SHED)
    found = await same_model.check(f"http://127.0.0.1:{served.port}", Golden(3, frozenset(), (ITEM,)), Prompts(), decode)
    assert found.failed == 1 and not found.holds


def test_the_recorded_outputs_of_the_tree_can_be_read() -> None:
    path = Path(__file__).resolve().parents[3] / "tests" / "end_to_end" / "golden_small.json"
    assert golden.load(path).items
