"""Whose match is how long is read from levels of bits: as plain lists would say it, and with no walk over all who hold a popular prefix."""

from hypothesis import given
from hypothesis import strategies as st

from router.policy.incarnation import Incarnation
from router.policy.prefix_match import PrefixMatch


class Names(dict[int, Incarnation]):
    """How many of them were asked for."""

    asked = 0

    def __getitem__(self, bit: int) -> Incarnation:
        self.asked += 1
        return super().__getitem__(bit)


def match_of(lengths: list[int]) -> tuple[PrefixMatch, list[Incarnation], Names]:
    """Replica i holds the first lengths[i] blocks."""
    replicas = [Incarnation(f"r{i}", 1) for i in range(len(lengths))]
    names = Names({1 << i: one for i, one in enumerate(replicas)})
    bits = {one: bit for bit, one in names.items()}
    levels = [(depth, sum(1 << i for i, length in enumerate(lengths) if length >= depth)) for depth in sorted(set(lengths) - {0})]
    return PrefixMatch(levels, lambda one: bits.get(one, 0), names), replicas, names


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(0, 12))
def test_it_says_what_a_list_of_all_would_say(lengths: list[int], count: int) -> None:
    match, replicas, _ = match_of(lengths)
    assert [match.blocks(one) for one in replicas] == lengths
    assert match.blocks(Incarnation("stranger", 1)) == 0
    assert match.longest == max(lengths, default=0)
    found = match.holders(count)
    assert len(set(found)) == len(found)
    assert [match.blocks(one) for one in found] == sorted((length for length in lengths if length), reverse=True)[:count]


def test_a_prefix_that_a_thousand_hold_is_no_walk_over_them() -> None:
    match, replicas, names = match_of([7] * 1_000)
    assert match.blocks(replicas[999]) == 7 and match.longest == 7
    assert len(match.holders(8)) == 8
    assert names.asked == 8
    assert len(match.holders(1_000)) == 1_000
    assert names.asked == 1_008, "the control: who wants all walks over all"
