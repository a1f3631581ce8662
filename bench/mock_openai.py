"""A plain OpenAI server without a model: streams numbered tokens at a set pace, with correct usage.

Raw asyncio, so that it is never what a measurement of the client measures. Faults can be switched on, to show that the
client sees them. `python -m bench.mock_openai --port 9000 --token-ms 20`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import enum
import itertools
import time
from dataclasses import dataclass

import msgspec
import uvloop

BODY_MAX_BYTES = 8 * 1024 * 1024
HANG_S = 3600.0
STAMP_RANGE_US = 2**31


class Fault(enum.StrEnum):
    NONE = "none"
    USAGE_TOO_HIGH = "usage_too_high"
    USAGE_TOO_LOW = "usage_too_low"
    NO_DONE = "no_done"
    TWO_FINISHES = "two_finishes"
    TOKEN_AFTER_FINISH = "token_after_finish"
    DROP_MIDWAY = "drop_midway"
    HANG_MIDWAY = "hang_midway"
    NONSENSE = "nonsense"
    ERROR_EVENT = "error_event"
    SHED = "shed"
    HANG_AT_ONCE = "hang_at_once"
    BAD_HTTP = "bad_http"
    NO_STREAM = "no_stream"
    ENDLESS = "endless"
    ONLY_COMMENTS = "only_comments"
    NO_TOKENS = "no_tokens"
    CACHED_TOO_HIGH = "cached_too_high"
    GOES_ON = "goes_on"  # events without end after [DONE]
    STAYS_OPEN = "stays_open"  # [DONE], and no end of the answer


@dataclass(frozen=True, slots=True)
class Pace:
    """Fixed timing: the first token after `first_ms`, the others `token_ms` apart. `send_ids`: with token ids in each event.

    `stamp`: the id of a token is when it was sent, in microseconds of `time.perf_counter`, modulo STAMP_RANGE_US.
    """

    first_ms: float = 0.0
    token_ms: float = 0.0
    send_ids: bool = True
    stamp: bool = False


class _Body(msgspec.Struct):
    prompt: list[int] | str | None = None
    messages: list[dict[str, object]] | None = None
    max_tokens: int | None = 16
    stream: bool = False
    return_token_ids: bool = False


class MockServer:
    """Serves until `close`. `stall()` makes it do nothing at all for a while, as a stopped process would."""

    def __init__(self, pace: Pace | None = None, fault: Fault = Fault.NONE) -> None:
        self.pace = pace or Pace()
        self.fault = fault
        self.served = 0
        self.disconnected = 0
        self.retry_after = "Retry-After: 2\r\nretry-after-ms: 1500\r\n"
        self.sheds_left = 0  # so many requests are refused before one is served
        self.drops_left = 0  # so many requests end their connection without a byte
        self._frozen_until_s = 0.0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # only to be cancelled at the end; never iterated where order matters

    async def start(self, port: int = 0) -> int:
        """Listen on 127.0.0.1; the port in use."""
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", port, backlog=4096)
        return int(self._server.sockets[0].getsockname()[1])

    def stall(self, duration_s: float) -> None:
        """Nothing is answered and no token is sent until it is over."""
        self._frozen_until_s = time.perf_counter() + duration_s

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                while await self._request(reader, writer):
                    pass
        except (ConnectionError, asyncio.IncompleteReadError):
            self.disconnected += 1
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; False when the connection is over."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            return False
        length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
        if length > BODY_MAX_BYTES:
            return False
        raw = await reader.readexactly(length)
        await self._thaw()
        if self.drops_left > 0:
            self.drops_left -= 1
            return False
        if head.startswith("get "):
            writer.write(_answer(200, {"status": "ok"}))
            return True
        try:
            body = msgspec.json.decode(raw, type=_Body)
        except msgspec.MsgspecError as error:
            writer.write(_answer(400, {"error": {"message": str(error), "type": "invalid_request_error"}}))
            return True
        if self.fault is Fault.SHED or self.sheds_left > 0:
            self.sheds_left -= 1
            writer.write(_answer(429, {"error": {"message": "busy", "type": "rate_limit"}}, self.retry_after))
            return True
        self.served += 1
        if self.fault is Fault.HANG_AT_ONCE:
            await asyncio.sleep(HANG_S)
        if self.fault is Fault.BAD_HTTP:
            writer.write(b"who is there?\r\n\r\n")
            return False
        if body.stream and self.fault is not Fault.NO_STREAM:
            return await self._stream(body, "chat" in head.split("\r\n", 1)[0], writer)
        writer.write(_answer(200, _whole(body)))
        return True

    async def _stream(self, body: _Body, chat: bool, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        count = body.max_tokens or 16
        name = f"mock-{self.served}"
        due_s = time.perf_counter() + self.pace.first_ms / 1e3
        endless = self.fault in (Fault.ENDLESS, Fault.ONLY_COMMENTS)
        for i in itertools.count() if endless else range(count):
            await self._until(due_s, writer)
            due_s += self.pace.token_ms / 1e3
            if self.fault is Fault.ONLY_COMMENTS:
                writer.write(_chunk(b": still here\n\n"))
                continue
            if self.fault in (Fault.DROP_MIDWAY, Fault.HANG_MIDWAY) and i == count // 2:
                if self.fault is Fault.HANG_MIDWAY:
                    await asyncio.sleep(HANG_S)
                return False
            ids = [self._token_id(i)] if self.pace.send_ids and body.return_token_ids else None
            finish = "length" if i == count - 1 and not endless else None
            if self.fault is Fault.NO_TOKENS:
                writer.write(_chunk(_empty(name) if finish is None else _event(name, "", None, finish, chat)))
                continue
            writer.write(_chunk(_event(name, f" t{i}", ids, finish, chat)))
        for line in self._endings(name, body, count, chat):
            writer.write(_chunk(line))
        if self.fault in (Fault.GOES_ON, Fault.STAYS_OPEN):
            await self._never_end(name, chat, writer)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _never_end(self, name: str, chat: bool, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(_chunk(_event(name, " more", None, None, chat) if self.fault is Fault.GOES_ON else b": still here\n\n"))
            await writer.drain()
            await asyncio.sleep(0.01)
        raise ConnectionResetError

    def _token_id(self, position: int) -> int:
        return int(time.perf_counter() * 1e6) % STAMP_RANGE_US if self.pace.stamp else 1000 + position

    def _endings(self, name: str, body: _Body, count: int, chat: bool) -> list[bytes]:
        """What follows the last token, with the fault in it."""
        lines: list[bytes] = []
        if self.fault is Fault.TWO_FINISHES:
            lines.append(_event(name, "", [] if self.pace.send_ids else None, "stop", chat))
        if self.fault is Fault.TOKEN_AFTER_FINISH:
            lines.append(_event(name, " more", [7] if self.pace.send_ids else None, None, chat))
        if self.fault is Fault.NONSENSE:
            lines.append(b"data: {never json\n\n")
        if self.fault is Fault.ERROR_EVENT:
            lines.append(b'data: {"error":{"message":"lost","type":"server_error"}}\n\n')
        lie = {Fault.USAGE_TOO_HIGH: 5, Fault.USAGE_TOO_LOW: -5}.get(self.fault, 0)
        usage = _usage(body, count + lie, cached=10**6 if self.fault is Fault.CACHED_TOO_HIGH else 0)
        lines.append(b"data: " + msgspec.json.encode({"id": name, "choices": [], "usage": usage}) + b"\n\n")
        if self.fault is not Fault.NO_DONE:
            lines.append(b"data: [DONE]\n\n")
        return lines

    async def _until(self, due_s: float, writer: asyncio.StreamWriter) -> None:
        wait_s = max(due_s, self._frozen_until_s) - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        if writer.is_closing():
            raise ConnectionResetError
        await writer.drain()

    async def _thaw(self) -> None:
        wait_s = self._frozen_until_s - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)


def _event(name: str, text: str, ids: list[int] | None, finish: str | None, chat: bool) -> bytes:
    choice: dict[str, object] = {"index": 0, "finish_reason": finish}
    if chat:
        choice["delta"] = {"content": text}
    else:
        choice["text"] = text
    if ids is not None:
        choice["token_ids"] = ids
    return b"data: " + msgspec.json.encode({"id": name, "choices": [choice]}) + b"\n\n"


def _empty(name: str) -> bytes:
    return b"data: " + msgspec.json.encode({"id": name, "choices": []}) + b"\n\n"


def _whole(body: _Body) -> dict[str, object]:
    count = body.max_tokens or 16
    text = "".join(f" t{i}" for i in range(count))
    choice = {"index": 0, "text": text, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
    return {"id": "mock", "choices": [choice], "usage": _usage(body, count)}


def _usage(body: _Body, count: int, cached: int = 0) -> dict[str, object]:
    if isinstance(body.prompt, list):
        prompt = len(body.prompt)
    else:
        prompt = len((body.prompt or str(body.messages)).split())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": count,
        "total_tokens": prompt + count,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _answer(status: int, body: object, headers: str = "") -> bytes:
    data = msgspec.json.encode(body)
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{headers}Content-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def _serve(port: int, pace: Pace, fault: Fault) -> None:
    server = MockServer(pace, fault)
    print(f"listening on 127.0.0.1:{await server.start(port)}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-ms", type=float, default=0.0)
    parser.add_argument("--token-ms", type=float, default=20.0)
    parser.add_argument("--stamp", action="store_true", help="token ids are times of sending")
    parser.add_argument("--fault", type=Fault, choices=list(Fault), default=Fault.NONE)
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(options.port, Pace(options.first_ms, options.token_ms, stamp=options.stamp), options.fault))


if __name__ == "__main__":
    main()
