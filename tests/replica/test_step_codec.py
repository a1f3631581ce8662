"""Steps as bytes: what arrives is what was planned, small while decoding, and nothing wrong is ever carried out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.contract.messages import SamplingParams
from replica.parallel.step_codec import HEADER_BYTES, CodecError, StepDecoder, StepEncoder, encode_stop
from replica.step import BlockCopy, Draw, Row, Step

BLOCK = 4
U32 = st.integers(0, 2**32 - 1)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    start = draw(st.integers(0, 40))
    tokens = draw(st.lists(U32, min_size=1, max_size=9))
    pages = -(-(start + len(tokens)) // BLOCK)
    blocks = draw(st.lists(st.integers(0, 3), min_size=pages, max_size=pages + 2))  # few values: prefixes are shared often
    wants = Draw(SamplingParams(seed=1, max_tokens=1), 0, [1], []) if draw(st.booleans()) else None
    return Row(draw(st.integers(0, 3)), tokens, start, blocks, wants, draw(st.none() | U32))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    chosen = {row.request: row for row in draw(st.lists(rows(), max_size=4))}
    copies = tuple(BlockCopy(a, b) for a, b in draw(st.lists(st.tuples(U32, U32), max_size=3)))
    return Step(draw(st.integers(0, 2**63)), tuple(chosen.values()), copies)


@given(st.lists(steps(), max_size=6))
@settings(max_examples=150, deadline=None)
def test_a_sequence_of_steps_arrives_as_planned(planned: list[Step]) -> None:
    encoder, decoder = StepEncoder(BLOCK), StepDecoder()
    for step in planned:
        got = decoder.decode(encoder.encode(step))
        assert got is not None
        assert (got.step_id, got.copies) == (step.step_id, step.copies)
        for row, want in zip(got.rows, step.rows, strict=True):
            pages = -(-(want.start + len(want.tokens)) // BLOCK)
            assert list(row.tokens) == list(want.tokens)
            assert list(row.blocks) == list(want.blocks[:pages])
            assert (row.request, row.start, row.score_from) == (want.request, want.start, want.score_from)
            assert (row.draw is None) == (want.draw is None)


def test_a_list_that_its_request_lengthens_is_no_trap() -> None:
    """The encoder must compare with what it sent, not with the request's own list, which has changed since."""
    encoder, decoder = StepEncoder(BLOCK), StepDecoder()
    blocks = [5]
    decoder.decode(encoder.encode(Step(1, (Row(1, [9], 3, blocks),))))
    blocks.append(6)
    blocks[0] = 7
    got = decoder.decode(encoder.encode(Step(2, (Row(1, [9], 4, blocks),))))
    assert got is not None
    assert list(got.rows[0].blocks) == [7, 6]


def test_a_decoding_request_costs_at_most_64_bytes_whatever_its_context() -> None:
    encoder = StepEncoder(16)
    blocks = list(range(600))
    draw = Draw(SamplingParams(seed=1, max_tokens=1), 0, [1], [])
    encoder.encode(Step(1, tuple(Row(n, [5], 8191, blocks, draw) for n in range(64))))
    data = encoder.encode(Step(2, tuple(Row(n, [5], 8192, blocks, draw) for n in range(64))))
    assert (len(data) - HEADER_BYTES) / 64 <= 64


def test_stop_is_no_step() -> None:
    assert StepDecoder().decode(encode_stop()) is None


@given(st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=100, deadline=None)
def test_a_flipped_byte_is_noticed(position: int, flip: int) -> None:
    data = bytearray(StepEncoder(BLOCK).encode(Step(1, (Row(1, [1, 2, 3], 0, [4]), Row(2, [7], 8, [1, 2, 3])), (BlockCopy(1, 2),))))
    index = position % len(data)
    data[index] ^= flip
    with pytest.raises(CodecError):
        StepDecoder().decode(bytes(data))


@given(st.binary(max_size=200))
def test_garbage_is_noticed(data: bytes) -> None:
    with pytest.raises(CodecError):
        StepDecoder().decode(data)


def test_a_rank_that_missed_a_step_refuses_the_next() -> None:
    encoder = StepEncoder(BLOCK)
    encoder.encode(Step(1, (Row(1, [1] * 8, 0, [4, 5]),)))
    with pytest.raises(CodecError, match="keeps 2 pages of 0"):
        StepDecoder().decode(encoder.encode(Step(2, (Row(1, [1], 8, [4, 5, 6]),))))


def test_too_few_pages_are_refused_by_the_sender() -> None:
    with pytest.raises(ValueError, match="needs 2 pages and has 1"):
        StepEncoder(BLOCK).encode(Step(1, (Row(1, [1] * 5, 0, [4]),)))
