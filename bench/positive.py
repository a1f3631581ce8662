"""Numbers of the command line that mean nothing at or below 0."""

from __future__ import annotations

import math


def check_positive(**values: float | None) -> None:
    """Raises ValueError for the first that is neither None nor a positive, finite number."""
    for name, value in values.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be a positive number, got {value:g}")
