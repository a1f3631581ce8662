"""Whatever is sent: a 4xx of OpenAI's shape or an answer, never a 5xx, and the next valid request works."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bench.drills import bodies
from bench.stack import Stack
from tests.end_to_end.idle import seconds_until_idle

pytestmark = [pytest.mark.cluster, pytest.mark.alone]


async def test_every_body_gets_one_of_its_statuses(served: Stack) -> None:
    faults = await bodies.run(served.url, bodies.load(Path(__file__).parent / "bodies.jsonl"))
    assert [f"{fault.body}: {fault.text}" for fault in faults] == []
    assert await seconds_until_idle(served.url) is not None


def framed(body: bytes, how: str) -> list[bytes]:
    """The pieces to write, one at a time, of the same request in another framing."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: rantang\r\nContent-Type: application/json\r\nConnection: close\r\n"
    if how == "chunked":
        chunks = [body[i : i + 7] for i in range(0, len(body), 7)]
        return [f"{head}Transfer-Encoding: chunked\r\n\r\n".encode(), *(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks), b"0\r\n\r\n"]
    whole = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    return [whole[i : i + 7] for i in range(0, len(whole), 7)] if how == "small writes" else [whole]


@pytest.mark.parametrize("how", ["content-length", "chunked", "small writes"])
async def test_framing_makes_no_difference(served: Stack, how: str) -> None:
    target = urlsplit(served.url)
    body = json.dumps({"model": "smollm2", "prompt": "Seven bytes at a time", "max_tokens": 1, "temperature": 0}).encode()
    reader, writer = await asyncio.open_connection(target.hostname, target.port)
    for piece in framed(body, how):
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.001)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
    assert b'"prompt_tokens":' in answer.replace(b'": ', b'":')
