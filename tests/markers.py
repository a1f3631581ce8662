"""Which modules of tests have to be imported to find those that start Ray."""

from __future__ import annotations


def may_start_ray(source: str) -> bool:
    """Whether a test of the module with this source can have the marker `cluster`."""
    return "mark.cluster" in source
