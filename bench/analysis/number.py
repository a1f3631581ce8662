"""Numbers for people."""

from __future__ import annotations

import math


def plain(value: float) -> str:
    """Three digits that matter or all whole ones, and never an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = min(6, max(0, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{digits}f}"


def short(value: float, digits: int = 3) -> str:
    """So many digits that matter; all whole ones where that would take an exponent."""
    text = f"{value:.{digits}g}"
    return plain(value) if "e+" in text else text
