from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.stop import StopMatcher, StopStrings

WORDS = st.text(alphabet="abc", min_size=1, max_size=5)


def stream(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """Texts sent for these pieces, the flush included, and the stop found."""
    matcher = StopMatcher(StopStrings(stops), include=include)
    sent: list[str] = []
    for piece in pieces:
        checked = matcher.push(piece)
        sent.append(checked.text)
        if checked.stop is not None:
            return sent, checked.stop
    return [*sent, matcher.flush()], None


def definition(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first end of any stop string in the text; the longest of those that end there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(st.lists(st.text(alphabet="abc", max_size=4), max_size=12), st.lists(WORDS, min_size=1, max_size=4), st.booleans())
def test_any_pieces_agree_with_the_definition(pieces: list[str], stops: list[str], include: bool) -> None:
    sent, stop = stream(pieces, stops, include=include)
    text, expected = definition("".join(pieces), stops)
    assert stop == expected
    assert "".join(sent) == text + (stop if include and stop else "")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=8), st.lists(WORDS, min_size=1, max_size=3))
def test_held_is_the_longest_end_that_may_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    text = sent = ""
    for piece in pieces:
        text += piece
        checked = matcher.push(piece)
        sent += checked.text
        if checked.stop is not None:
            return
        held = len(text) - len(sent)
        ends = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        assert held == max(ends, default=0)


def test_a_stop_across_pieces_never_leaks() -> None:
    sent, stop = stream(["The", " quick", " brown", " fox", " jumps"], ["own fox"])
    assert (sent, stop) == (["The", " quick", " br", ""], "own fox")


def test_looking_at_each_piece_alone_would_leak() -> None:
    """The control: the same pieces, searched one by one."""
    assert not any("own fox" in piece for piece in ["The", " quick", " brown", " fox", " jumps"])


def test_ordinary_text_is_sent_at_once_beside_a_long_stop() -> None:
    assert stream(["Hello", " there"], ["X" * 400])[0] == ["Hello", " there", ""]


def test_a_held_end_is_flushed() -> None:
    assert stream(["Really", "?"], ["?!"]) == (["Really", "", "?"], None)
    assert stream(["a", "\n"], ["\n\n###"]) == (["a", "", "\n"], None)


def test_long_stops_cost_no_more_than_their_number() -> None:
    """16 strings of 1,024 characters that all but match: every character is looked at once per string."""
    stops = ["a" * (1023 - i) + "b" for i in range(16)]
    sent, stop = stream(["a" * 50] * 60, stops)
    assert stop is None and sum(map(len, sent)) == 3000
