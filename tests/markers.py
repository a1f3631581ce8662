"""Which tests start Ray, which of them bear others beside them, and which modules have to be imported to find them."""

from __future__ import annotations

WITHOUT_RAY = "not cluster"
BESIDE_OTHERS = "cluster and not alone"  # the stack of mocks, which mostly waits
ALONE = "alone"
OF_RAY_ONLY = frozenset({"cluster", BESIDE_OTHERS, ALONE})


def may_start_ray(source: str) -> bool:
    """Whether a test of the module with this source can have the marker `cluster`."""
    return "mark.cluster" in source
