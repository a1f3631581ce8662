"""Replicas that cost next to nothing: the link's protocol, and a made-up token per request and step, as fast as they are read.

`python -m bench.link_mock --replicas 64` prints their ports and serves until it is ended. What a router costs can be measured
against them: they say what real ones say (load, acceptance, tokens, KV events), one frame a step.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
from dataclasses import dataclass
from typing import cast

import uvloop

from replica.contract import wire
from replica.contract.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Challenge,
    EngineLimits,
    FinishReason,
    Frame,
    GenerateRequest,
    Hello,
    KvEvent,
    LoadReport,
    Snapshot,
    StepTimeCoefficients,
    Stored,
    Submit,
    TokenDelta,
    ToRouter,
    Welcome,
)

SECRET = b"bench"
BEAT_S = 0.5
TOKEN_IDS = range(1_000, 2_000)  # ordinary words of SmolLM2's
LIMITS = EngineLimits(
    max_model_len=8_192,
    max_num_seqs=256,
    max_num_batched_tokens=8_192,
    num_blocks=1_000_000,
    block_size=16,
    max_waiting=100_000,
    vocab_size=49_152,
)
FAST = StepTimeCoefficients(a=1e-5, b=1e-8, c=1e-7, d=0.0)
SLOW = StepTimeCoefficients(a=0.05, b=1e-3, c=1e-3, d=0.0)
QUEUED_TOKENS = 400_000  # of a full one, at SLOW: minutes of prefill


@dataclass(slots=True)
class _Stream:
    request: GenerateRequest
    sent: int  # tokens, those of earlier attempts included
    is_new: bool = True


class MockReplica(asyncio.Protocol):
    """One connection of a router. A step begins when the loop has nothing else to do and the router has read the last ones."""

    def __init__(self, replica_id: str, *, is_full: bool = False) -> None:
        """`is_full`: it says that it has work for minutes."""
        self._id = replica_id
        self._is_full = is_full
        self._nonce = secrets.token_bytes(32)
        self._splitter = wire.FrameSplitter()
        self._streams: dict[int, _Stream] = {}
        self._accepted: list[int] = []
        self._progress = 0
        self._sequence = 0
        self._stepping = False
        self._paused = False
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._say(Challenge(PROTOCOL_VERSION, self._nonce))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._wake()

    def data_received(self, data: bytes) -> None:
        for body in self._splitter.feed(data):
            message = wire.decode_to_replica(body)
            if isinstance(message, Submit):
                for request in message.requests:
                    self._streams[request.attempt] = _Stream(request, sent=len(request.emitted_ids))
                    self._accepted.append(request.attempt)
                self._wake()
            elif isinstance(message, Cancel):
                for attempt in message.attempts:
                    self._streams.pop(attempt, None)
            elif isinstance(message, Hello):
                assert wire.mac_is_valid(SECRET, self._nonce, message.router_id, message.mac), "another secret than the mock's"
                self._say(Welcome(PROTOCOL_VERSION, self._id, 1, "smollm2", "mock", "mock", LIMITS, self._load()))
                self._beat()
            else:
                self._say(Snapshot(1, self._sequence, ()))

    # --- its life ---

    def _wake(self) -> None:
        if not self._stepping and not self._paused and self._streams:
            self._stepping = True
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._stepping = False
        self._progress += 1
        events: list[KvEvent] = []
        deltas = [self._delta(stream, events) for stream in self._streams.values()]
        for delta in deltas:
            if delta.finish is not None:
                del self._streams[delta.attempt]
        self._sequence += bool(events)
        accepted, self._accepted = tuple(self._accepted), []
        self._say(Frame(1, self._sequence, self._load(), tuple(deltas), accepted, (), tuple(events), int(bool(events))))
        self._wake()

    def _delta(self, stream: _Stream, events: list[KvEvent]) -> TokenDelta:
        request = stream.request
        first, last = stream.is_new, stream.sent + 1 >= request.sampling.max_tokens
        stream.is_new = False
        if first and request.block_keys:
            events.append(Stored(request.block_keys, b"\0" * 16))
        token = TOKEN_IDS[(request.attempt * 31 + stream.sent) % len(TOKEN_IDS)]
        stream.sent += 1
        finish = FinishReason.LENGTH if last else None
        if first:
            return TokenDelta(request.attempt, (token,), cached_tokens=0, waited_s=0.0, finish=finish)
        return TokenDelta(request.attempt, (token,), finish=finish)

    def _beat(self) -> None:
        if self._transport is None:
            return
        if not self._stepping:
            self._progress += self._is_full
            self._say(Frame(1, self._sequence, self._load()))
        self._loop.call_later(BEAT_S, self._beat)

    def _load(self) -> LoadReport:
        if self._is_full:
            return LoadReport(self._progress, 32, 0, QUEUED_TOKENS, 10_000, LIMITS.num_blocks // 2, 0, SLOW, 1.0)
        running = len(self._streams)
        return LoadReport(self._progress, running, 0, 0, 100 * running, LIMITS.num_blocks - 7 * running, 0, FAST, 1e-5)

    def _say(self, message: ToRouter) -> None:
        if self._transport is not None:
            self._transport.write(wire.encode(message))


async def serve(replicas: int, *, is_full: bool = False) -> list[int]:
    """Their ports."""
    loop = asyncio.get_running_loop()
    ports = []
    for number in range(replicas):
        server = await loop.create_server(lambda number=number: MockReplica(f"r{number}", is_full=is_full), "127.0.0.1", 0)  # type: ignore[misc]
        ports.append(int(server.sockets[0].getsockname()[1]))
    return ports


async def _main(replicas: int, is_full: bool) -> None:
    print(*await serve(replicas, is_full=is_full), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--full", action="store_true", help="they say that they have work for minutes, so that every request is refused")
    options = parser.parse_args()
    uvloop.run(_main(options.replicas, options.full))


if __name__ == "__main__":
    main()
