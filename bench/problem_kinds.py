"""Faults that differ in their numbers alone are one kind: a server that miscounts must not fill the screen."""

from __future__ import annotations

import re
from collections.abc import Mapping

LIKE = " (and others that differ in their numbers)"


def by_kind(counts: Mapping[str, int]) -> dict[str, int]:
    """One example of each kind with the count of all, in the order given. A status is a kind of its own."""
    example: dict[str, str] = {}
    several: set[str] = set()
    total: dict[str, int] = {}
    for text, count in counts.items():
        bare = text.removesuffix(LIKE)
        kind = bare if bare.startswith("status ") else re.sub("[0-9]+", "#", bare)
        if example.setdefault(kind, bare) != bare or bare != text:
            several.add(kind)
        total[kind] = total.get(kind, 0) + count
    return {example[kind] + LIKE * (kind in several): count for kind, count in total.items()}
