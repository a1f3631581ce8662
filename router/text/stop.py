"""Stop strings over a growing text: found across the borders of tokens, and never a part of one let through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Checked:
    """`text` may be sent. `stop` is the string that ended the choice; nothing follows then."""

    text: str
    stop: str | None = None


class StopStrings:
    """What all choices of a request share: the strings and, for each, Knuth–Morris–Pratt's borders. Built once, O(characters)."""

    __slots__ = ("borders", "first_characters", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        """`strings` are not empty."""
        self.strings = tuple(strings)
        self.borders = tuple(_borders(string) for string in self.strings)
        self.first_characters = tuple(dict.fromkeys(string[0] for string in self.strings))


class StopMatcher:
    """One choice's text. Holds back the longest end that could still become a stop string, and not a character more.

    Of several stop strings the one that is complete first wins; of those complete at the same character, the longest.
    Amortised O(stop strings) per character, whatever their length.
    """

    __slots__ = ("_held", "_include", "_matched", "_stops")

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        """`include`: a stop string found is part of the text."""
        self._stops = stops
        self._include = include
        self._held = ""
        self._matched = [0] * len(stops.strings)  # how much of each string the text ends with

    def push(self, text: str) -> Checked:
        if not self._held and not any(character in text for character in self._stops.first_characters):
            return Checked(text)
        window = self._held + text
        for position, character in enumerate(text, len(self._held) + 1):
            stop = self._step(character)
            if stop is not None:
                self._held = ""
                return Checked(window[: position if self._include else position - len(stop)], stop)
        keep = max(self._matched)
        self._held = window[len(window) - keep :]
        return Checked(window[: len(window) - keep])

    def flush(self) -> str:
        """The held end: the text ended without completing a stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Advance every string by one character; the longest that is now complete."""
        complete: str | None = None
        for index, string in enumerate(self._stops.strings):
            matched = self._matched[index]
            borders = self._stops.borders[index]
            while matched and string[matched] != character:
                matched = borders[matched - 1]
            if string[matched] == character:
                matched += 1
            self._matched[index] = matched
            if matched == len(string) and (complete is None or matched > len(complete)):
                complete = string
        return complete


def _borders(string: str) -> list[int]:
    """borders[i] = length of the longest proper prefix of string[:i+1] that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for i in range(1, len(string)):
        while length and string[i] != string[length]:
            length = borders[length - 1]
        if string[i] == string[length]:
            length += 1
        borders[i] = length
    return borders
