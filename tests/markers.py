"""Which tests start Ray, which of them bear others beside them, which bear to wait; and which modules have to be imported to find them."""

from __future__ import annotations

WITHOUT_RAY = "not cluster and not patient"
BESIDE_OTHERS = "cluster and not alone"  # the stack of mocks, which mostly waits
ALONE = "alone"
PATIENT = "patient"  # compute, and look at no clock: with what those that are alone leave of the cores
OF_RAY_ONLY = frozenset({"cluster", BESIDE_OTHERS, ALONE})


def may_be_of(marks: str, source: str) -> bool:
    """Whether a test of the module with this source can be of what `marks` chooses."""
    if marks in OF_RAY_ONLY:
        return "mark.cluster" in source
    return marks != PATIENT or "mark.patient" in source
