"""Frames: what is written is read, and what is not ours is refused."""

from __future__ import annotations

import asyncio

import pytest

from replica.contract import wire
from replica.contract.messages import (
    Cancel,
    Cleared,
    Frame,
    GenerateRequest,
    Hello,
    LoadReport,
    Removed,
    SamplingParams,
    Stored,
    Submit,
    TokenDelta,
    TokenLogprobs,
)
from replica.contract.messages import StepTimeCoefficients as Coefficients

LOAD = LoadReport(1, 2, 3, 4, 5, 6, 7, Coefficients(1.0, 2.0, 3.0, 4.0), 0.1)


def test_a_frame_survives_the_way() -> None:
    deltas = (TokenDelta(7, (1, 2), logprobs=(TokenLogprobs(1, -0.5, ((1, -0.5), (9, -1.0))),), cached_tokens=16), TokenDelta(8))
    events = (Stored((b"k" * 16,), b"p" * 16), Removed((b"q" * 16,)), Cleared())
    frame = Frame(epoch=3, sequence=4, load=LOAD, deltas=deltas, accepted=(9,), events=events)
    assert wire.decode_to_router(wire.encode(frame)[4:]) == frame


def test_a_request_survives_the_way() -> None:
    request = GenerateRequest(1, "cmpl-1", 0, (5, 6), (b"k" * 16,), SamplingParams(seed=2**63 - 1, max_tokens=3), emitted_ids=(7,))
    submit = Submit((request,))
    assert wire.decode_to_replica(wire.encode(submit)[4:]) == submit


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\x01", wire.encode(Frame(1, 1, LOAD))[4:]])
def test_what_is_not_for_a_replica_is_refused(body: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_to_replica(body)


@pytest.mark.parametrize("size", [1, 3, 7, 40, 10_000])
def test_frames_come_whole_however_the_stream_is_cut(size: int) -> None:
    messages = [Cancel(tuple(range(count))) for count in (1, 0, 300, 2, 5)]
    data = b"".join(map(wire.encode, messages))
    splitter = wire.FrameSplitter()
    bodies = [body for start in range(0, len(data), size) for body in splitter.feed(data[start : start + size])]
    assert [wire.decode_to_replica(body) for body in bodies] == messages


async def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(wire.encode(Cancel((1,)))[:4])  # the length alone is enough to judge
    with pytest.raises(wire.WireError, match="exceeds"):
        await wire.read_body(reader, max_bytes=2)


def test_a_mac_is_bound_to_nonce_and_router() -> None:
    mac = wire.handshake_mac(b"secret", b"nonce", "router-1")
    assert wire.mac_is_valid(b"secret", b"nonce", "router-1", mac)
    assert not wire.mac_is_valid(b"secret", b"other", "router-1", mac)
    assert not wire.mac_is_valid(b"secret", b"nonce", "router-2", mac)
    assert not wire.mac_is_valid(b"other", b"nonce", "router-1", mac)
    assert isinstance(wire.decode_to_replica(wire.encode(Hello(1, "router-1", mac))[4:]), Hello)
