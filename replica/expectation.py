"""What is known of a step before it has run: how far everybody will be computed, and that a token will be drawn, though not which.

While a step runs its requests are as they will be if every row brings what it is to bring: `computed` is the end of its
row, and an UNKNOWN token follows if the row draws one. So the next step is planned by the same rules as any other. Only
`tokens` gets it: nobody hashes, samples or sends what is not known.
"""

from __future__ import annotations

from replica.plan import Plan

UNKNOWN = -1  # no token id


def can_be_expected(plan: Plan) -> bool:
    """Prompt scores say where the next chunk has to begin: such a step is waited for."""
    return all(row.score_from is None for row in plan.step.rows[plan.shape.decodes :])


def expect(plan: Plan) -> None:
    """`plan` runs: its requests become what they will be."""
    for request, row in zip(plan.requests, plan.step.rows, strict=True):
        request.computed = row.start + len(row.tokens)
        if row.draw is not None:
            request.tokens.append(UNKNOWN)


def expect_nothing(plan: Plan) -> None:
    """It did not bring what was expected: take every UNKNOWN back."""
    for request in plan.requests:
        if request.tokens[-1] == UNKNOWN:
            request.tokens.pop()
