"""CPU per streamed token of both ends of the link: a mock replica in this process, a router's LinkClient in another one.

    python -m bench.link_cpu [streams] [step_ms] [seconds]

Prints microseconds of CPU per token of the link's server (the event loop's thread), of the client's process, and, for
comparison, of the engine's thread (scheduling and made-up tokens). Starting up is not counted.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import threading
import time
from multiprocessing.connection import Connection

import uvloop

from replica.config import EngineConfig
from replica.contract.messages import Frame, GenerateRequest, SamplingParams, Snapshot, Welcome
from replica.server import ReplicaServer
from router.link import LinkClient, Member

SECRET = b"bench"
WARM_UP_S = 1.0


class Counter:
    """A router that only counts."""

    def __init__(self) -> None:
        self.tokens = 0
        self.frames = 0
        self.ready = asyncio.Event()

    def connected(self, replica_id: str, welcome: Welcome) -> None:
        self.ready.set()

    def frame(self, replica_id: str, frame: Frame) -> None:
        self.frames += 1
        for delta in frame.deltas:
            self.tokens += len(delta.token_ids)

    def snapshot(self, replica_id: str, snapshot: Snapshot) -> None: ...

    def lost(self, replica_id: str, reason: str) -> None:
        self.ready.set()


async def _count(port: int, streams: int, seconds: float, results: Connection) -> None:
    counter = Counter()
    client = LinkClient(Member("replica", "127.0.0.1", port), router_id="router", secret=SECRET, listener=counter)
    client.start()
    await counter.ready.wait()
    sampling = SamplingParams(seed=1, max_tokens=7000, ignore_eos=True)
    prompts = [tuple(range(10 + stream, 138 + stream)) for stream in range(streams)]
    client.submit([GenerateRequest(stream, f"r{stream}", 0, prompt, (), sampling) for stream, prompt in enumerate(prompts)])
    await asyncio.sleep(WARM_UP_S)
    results.send("go")
    tokens, frames, cpu_s = counter.tokens, counter.frames, time.process_time()
    await asyncio.sleep(seconds)
    results.send((counter.tokens - tokens, counter.frames - frames, time.process_time() - cpu_s))
    await client.close()


def _router(port: int, streams: int, seconds: float, results: Connection) -> None:
    uvloop.run(_count(port, streams, seconds, results))


async def _serve(streams: int, step_ms: float, seconds: float) -> None:
    config = EngineConfig.model_validate(
        {"runner": "mock", "mock_step_ms": step_ms, "max_num_seqs": streams, "num_gpu_blocks_override": 600 * streams}
    )
    server = ReplicaServer(config, replica_id="replica", secret=SECRET)
    await server.start()
    engine = next(thread for thread in threading.enumerate() if thread.name == "engine")
    assert engine.ident is not None
    engine_clock = time.pthread_getcpuclockid(engine.ident)
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    router = context.Process(target=_router, args=(server.address[1], streams, seconds, theirs), daemon=True)
    router.start()
    await asyncio.to_thread(ours.recv)
    link_s, engine_s = time.thread_time(), time.clock_gettime(engine_clock)
    tokens, frames, client_s = await asyncio.to_thread(ours.recv)
    link_s, engine_s = time.thread_time() - link_s, time.clock_gettime(engine_clock) - engine_s
    router.join()
    await server.stop()
    print(
        f"{streams} streams, {tokens / seconds:.0f} tokens/s in {frames / seconds:.1f} frames/s; CPU µs per token: "
        f"link server {1e6 * link_s / tokens:.1f}, client {1e6 * client_s / tokens:.1f}, engine thread {1e6 * engine_s / tokens:.1f}"
    )


if __name__ == "__main__":
    streams, step_ms, seconds = (*sys.argv[1:], *("32", "20", "10")[len(sys.argv) - 1 :])
    uvloop.run(_serve(int(streams), float(step_ms), float(seconds)))
