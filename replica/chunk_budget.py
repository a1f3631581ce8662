"""How much prefill one step may take: tokens, and seconds by the step-time model."""

from __future__ import annotations

import math

from replica.contract.messages import StepTimeCoefficients


class ChunkBudget:
    """Filled while a step is planned.

    `seconds` is what the inter-token SLO leaves after the decodes; None where no decode runs, then tokens alone bound the
    step. The first chunk of a step may always take one block: prefill moves even when decodes alone break the SLO. A `half`
    has no such right, and leaves this one's as it is.
    """

    def __init__(
        self, *, tokens: int, seconds: float | None, coefficients: StepTimeCoefficients, block_size: int, whole: bool = False
    ) -> None:
        self._whole = whole
        self.tokens = tokens
        self._seconds = seconds
        self._coefficients = coefficients
        self._block_size = block_size
        self._untouched = True
        self._half_of: ChunkBudget | None = None

    def half(self, start: int) -> ChunkBudget:
        """Half of the tokens, and half of the seconds that a chunk from `start` has. What is spent of it is spent of this one too."""
        half = ChunkBudget(
            tokens=self.tokens // 2,
            seconds=None if self._seconds is None else (self._seconds - self._coefficients.d * start) / 2,
            coefficients=self._coefficients,
            block_size=self._block_size,
            whole=self._whole,
        )
        half._untouched = False
        half._half_of = self
        return half

    def fit(self, start: int, wanted: int, at_most: int | None = None) -> int:
        """Tokens of a chunk from position `start` that may still join: 0 … wanted, and no more than `at_most`.

        A chunk cut short ends with a block, if there is one.
        Where prompts are computed `whole`, all or nothing: the step's first always, another one if the budget holds all of it.
        """
        if self._whole:
            affordable = self.tokens if self._seconds is None else min(self.tokens, self._affordable(start))
            return wanted if self._untouched or wanted <= affordable else 0
        count = min(wanted, self.tokens) if at_most is None else min(wanted, self.tokens, at_most)
        if self._seconds is not None:
            count = min(count, max(self._affordable(start), self._block_size if self._untouched else 0))
        if count < wanted:
            whole = (start + count) // self._block_size * self._block_size - start
            if whole > 0:
                count = whole
            elif not self._untouched:
                return 0  # less than a block, and the step has prefill already: wait for a whole one
        return max(count, 0)

    def spend(self, start: int, count: int) -> None:
        self._untouched = False
        self._take(start, count)

    def _take(self, start: int, count: int) -> None:
        self.tokens -= count
        if self._seconds is not None:
            k = self._coefficients
            self._seconds -= k.b * count + k.d * (start + count) + k.e * count * (start + count)
        if self._half_of is not None:
            self._half_of._take(start, count)

    def _affordable(self, start: int) -> int:
        """Largest n with b·n + d·(start+n) + e·n·(start+n) ≤ seconds left, and no more than the tokens left."""
        assert self._seconds is not None
        k = self._coefficients
        linear = k.b + k.d + k.e * start
        left = self._seconds - k.d * start
        if left <= 0:
            return 0
        slope = linear + math.sqrt(linear * linear + 4 * k.e * left)  # the root without a difference: a tiny e cancels nothing
        return int(2 * left / slope) if 2 * left < slope * self.tokens else max(self.tokens, 0)
