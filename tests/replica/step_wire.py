"""Steps told to a rank as bytes: what it computes with is what rank 0 makes of the Step itself."""

from __future__ import annotations

import numpy as np

from replica.parallel.step_decoder import StepDecoder
from replica.parallel.step_encoder import StepEncoder
from replica.step import Step
from replica.step_inputs import StepInputs, build_inputs


class StepWire:
    """Both ends. `prepares`: they have time between two Steps."""

    def __init__(self, block_size: int, *, prepares: bool = True) -> None:
        self.encoder, self.decoder = StepEncoder(block_size), StepDecoder(block_size)
        self._block_size = block_size
        self._prepares = prepares

    def assert_carries(self, step: Step) -> None:
        assert min((min(row.tokens) for row in step.rows), default=0) >= 0, "a token that is not known yet"
        got = self.decoder.decode(self.encoder.encode(step))
        assert got is not None
        assert got.step_id == step.step_id
        assert got.copies == tuple((copy.source, copy.target) for copy in step.copies)
        assert got.scored == tuple((index, row.score_from) for index, row in enumerate(step.rows) if row.score_from is not None)
        if step.rows:
            assert got.inputs is not None
            assert_equal(got.inputs, build_inputs(step, self._block_size))
        else:
            assert got.inputs is None
        if self._prepares:
            self.encoder.prepare()
            self.decoder.prepare()


def assert_equal(got: StepInputs, want: StepInputs) -> None:
    assert (got.drawing, got.quiet) == (want.drawing, want.quiet)
    for name in ("token_ids", "positions", "first_tokens", "last_tokens"):
        _assert_same(getattr(got, name), getattr(want, name))
    for name in ("starts", "counts", "tables"):
        _assert_same(getattr(got.batch, name), getattr(want.batch, name))


def _assert_same(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype
    assert got.tolist() == want.tolist()
