"""Whole numbers of a body, with one sentence for all that lies outside their range."""

from __future__ import annotations

from typing import Any

from pydantic import BeforeValidator

_BEYOND_64_BITS = 2.0**63  # the JSON parser makes floats of what no integer of 64 bits holds


def within(least: int, most: int) -> BeforeValidator:
    """Refuses what is outside least … most, however large, naming both; what is no whole number is left to pydantic."""

    def check(value: Any) -> Any:
        outside = type(value) is int and not least <= value <= most
        if outside or (type(value) is float and abs(value) >= _BEYOND_64_BITS):
            raise ValueError(f"must be a whole number from {least} to {most}")
        return value

    return BeforeValidator(check)
