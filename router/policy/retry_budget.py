"""Retries are a share of the requests, whatever goes wrong (L12)."""

from __future__ import annotations

_SHARE = 0.1
_FIRST = 3.0  # a quiet router may retry too
_SAVED_MAX = 50.0


class RetryBudget:
    """A bucket that every request fills by a tenth of a retry."""

    def __init__(self) -> None:
        self._left = _FIRST

    def request(self) -> None:
        self._left = min(_SAVED_MAX, self._left + _SHARE)

    def take(self) -> bool:
        """True: one more retry is within the budget, and is spent."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
