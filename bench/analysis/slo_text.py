"""An SLO as it is written on the command line: `ttft_ms=2000,itl_p95_ms=200`."""

from __future__ import annotations

import math
from dataclasses import fields

from bench.slo import Slo

NAMES = tuple(field.name for field in fields(Slo))


def parse_slo(text: str) -> Slo:
    """Raises ValueError with what is wrong, and with the list of targets for an unknown one. At least one is needed."""
    targets: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in NAMES:
            raise ValueError(f"{part!r} is no target; there are {', '.join(f'{each}=…' for each in NAMES)}")
        if name in targets:
            raise ValueError(f"{name} is given twice")
        try:
            targets[name] = float(value)
        except ValueError:
            raise ValueError(f"{part!r}: {value!r} is no number of milliseconds") from None
        if not (targets[name] > 0 and math.isfinite(targets[name])):
            raise ValueError(f"{part!r}: a target must be positive")
    if not targets:
        raise ValueError("without a target every answer is good, and no load too high: give at least one, such as ttft_ms=2000")
    return Slo(**targets)
