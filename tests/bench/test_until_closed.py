"""An answer of no stated length ends with its connection, as HTTP/1.0 servers and some proxies send it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench.answer import Expectation
from bench.connection import Target
from bench.load_client import LoadClient, json_call
from bench.record import Outcome

EVENT = b'data: {"id":"x","choices":[{"index":0,"text":" a","finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'
DONE = b"data: [DONE]\n\n"
BARE = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CLOSING = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
COUNTED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9999\r\n\r\n"
CALL = json_call("/v1/completions", {"prompt": "a b c", "stream": True}, Expectation(prompt_tokens=3, completion_tokens=1))


@asynccontextmanager
async def answering(data: bytes) -> AsyncIterator[LoadClient]:
    """A server that says the same to everybody, and hangs up."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(CALL.body))
        writer.write(data)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    client = LoadClient(Target(*server.sockets[0].getsockname()[:2]), timeout_s=20.0)
    try:
        yield client
    finally:
        client.close()
        server.close()


@pytest.mark.parametrize(
    ("data", "outcome", "problems"),
    [
        (BARE + EVENT + USAGE + DONE, Outcome.COMPLETED, []),
        (CLOSING + EVENT + USAGE + DONE, Outcome.COMPLETED, []),
        (CLOSING + EVENT + USAGE, Outcome.WRONG, ["no [DONE]"]),
        (BARE + EVENT[:20], Outcome.WRONG, ["unfinished event", "no [DONE]", "no finish", "no usage"]),
        (b"HTTP/1.0 500 X\r\n\r\nout of order", Outcome.ERROR, []),
        (CHUNKED + b"%x\r\n%b\r\n" % (len(EVENT), EVENT), Outcome.ERROR, ["connection closed"]),
        (COUNTED + EVENT + USAGE + DONE, Outcome.ERROR, ["connection closed"]),
        (b"HTTP/1.1 200", Outcome.ERROR, ["connection closed"]),
    ],
)
async def test_the_end_of_the_connection_ends_only_an_answer_without_length(data: bytes, outcome: Outcome, problems: list[str]) -> None:
    async with answering(data) as client:
        for _ in range(2):  # the second on a new connection: nothing of the first is left
            record = await client.send(CALL)
            assert (record.outcome, record.problems) == (outcome, problems)
