"""The router's end of the link against a replica made of a few lines: what it accepts, what it gives up on, and how it tells."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from replica.contract import wire
from replica.contract.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Challenge,
    EngineLimits,
    Frame,
    GenerateRequest,
    Hello,
    LoadReport,
    Refused,
    SamplingParams,
    Snapshot,
    StepTimeCoefficients,
    Submit,
    ToReplica,
    WantSnapshot,
    Welcome,
)
from router import link as link_module
from router.backoff import FIRST_S, LARGEST_S, reconnect_delay_s
from router.link import Link, LinkClient, LinkListener, Member
from router.link_fake import FakeLink

SECRET = b"client test"
LIMITS = EngineLimits(128, 4, 64, 32, 16, 8, 1000)
LOAD = LoadReport(0, 0, 0, 0, 0, 32, 0, StepTimeCoefficients(0.01, 0.0, 0.0, 0.0), 0.01)
WELCOME = Welcome(PROTOCOL_VERSION, "one", 5, "m", "r", "f", LIMITS, LOAD)
FRAME = Frame(epoch=5, sequence=0, load=LOAD)


class Ear:
    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def connected(self, replica_id: str, welcome: Welcome) -> None:
        self.calls.append(("connected", welcome))

    def frame(self, replica_id: str, frame: Frame) -> None:
        self.calls.append(("frame", frame))

    def snapshot(self, replica_id: str, snapshot: Snapshot) -> None:
        self.calls.append(("snapshot", snapshot))

    def lost(self, replica_id: str, reason: str) -> None:
        self.calls.append(("lost", reason))

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def reason(self) -> str:
        reasons = [str(value) for name, value in self.calls if name == "lost"]
        assert len(reasons) == 1, reasons  # exactly once
        assert self.names()[-1] == "lost"
        return reasons[0]


Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def replica(behave: Behaviour, tls: ssl.SSLContext | None = None) -> AsyncIterator[Member]:
    tasks: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await behave(reader, writer)
        writer.close()

    def start(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.ensure_future(serve(reader, writer)))

    server = await asyncio.start_server(start, "127.0.0.1", 0, ssl=tls)
    try:
        yield Member("one", "127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, welcome: Welcome = WELCOME) -> Hello:
    writer.write(wire.encode(Challenge(PROTOCOL_VERSION, b"n" * 32)))
    hello = wire.decode_to_replica(await wire.read_body(reader))
    assert isinstance(hello, Hello)
    writer.write(wire.encode(welcome))
    return hello


def client(member: Member, ear: LinkListener, **options: object) -> LinkClient:
    return LinkClient(member, router_id="router-9", secret=SECRET, listener=ear, **options)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - short, and in tests only
            await asyncio.sleep(0.003)


def make_request(attempt: int, tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(attempt, f"r{attempt}", 0, tuple(range(tokens)), (), SamplingParams(seed=1, max_tokens=4))


async def test_handshake_then_messages_both_ways() -> None:
    heard: list[ToReplica] = []

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await greet(reader, writer))
        data = wire.encode(FRAME) + wire.encode(Snapshot(5, 0, ((b"k" * 16, b"p" * 16),)))
        for index in range(len(data)):  # in the smallest pieces
            writer.write(data[index : index + 1])
            if index % 16 == 0:
                await asyncio.sleep(0)
        while True:
            heard.append(wire.decode_to_replica(await wire.read_body(reader)))

    async with replica(behave) as member:
        ear = Ear()
        link = client(member, ear)
        assert not link.submit([make_request(1)])  # not before it is connected
        link.start()
        assert ear.calls == []  # never before start() has returned
        await until(lambda: len(ear.calls) == 3)
        assert ear.names() == ["connected", "frame", "snapshot"]
        assert ear.calls[0][1] == WELCOME
        assert link.connected
        assert link.submit([make_request(1), make_request(2)])
        assert link.cancel([1])
        assert link.want_snapshot()
        await until(lambda: len(heard) == 4)
        hello = heard[0]
        assert isinstance(hello, Hello)
        assert hello.router_id == "router-9"
        assert wire.mac_is_valid(SECRET, b"n" * 32, "router-9", hello.mac)
        assert heard[1:] == [Submit((make_request(1), make_request(2))), Cancel((1,)), WantSnapshot()]
        await link.close()
        await link.close()
        assert ear.reason() == "closed"
        assert not link.submit([make_request(3)])


async def refused(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(wire.encode(Challenge(PROTOCOL_VERSION, b"n")))
    await wire.read_body(reader)
    writer.write(wire.encode(Refused("wrong secret")))
    await reader.read()


async def other_protocol(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(wire.encode(Challenge(99, b"n")))
    await reader.read()


async def somebody_else(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await greet(reader, writer, Welcome(PROTOCOL_VERSION, "two", 5, "m", "r", "f", LIMITS, LOAD))
    await reader.read()


async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await reader.read()


async def frame_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(wire.encode(FRAME))
    await reader.read()


async def two_welcomes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await greet(reader, writer)
    writer.write(wire.encode(WELCOME))
    await reader.read()


async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await greet(reader, writer)


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (refused, "refused: wrong secret"),
        (other_protocol, "protocol 99, this router speaks 1"),
        (somebody_else, "this is two, not one"),
        (garbage, "exceeds"),
        (frame_first, "Frame out of turn"),
        (two_welcomes, "Welcome out of turn"),
        (hangs_up, "closed by the replica"),
        (silent, "no welcome"),
    ],
)
async def test_every_way_to_fail_is_told_once(behave: Behaviour, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "CONNECT_TIMEOUT_S", 0.3 if behave is silent else 5.0)
    async with replica(behave) as member:
        ear = Ear()
        link = client(member, ear)
        link.start()
        await until(lambda: "lost" in ear.names())
        await asyncio.sleep(0.02)
        assert reason in ear.reason()
        assert not link.connected
        await link.close()
        assert ear.names().count("lost") == 1


async def test_nobody_there_is_told() -> None:
    async with replica(silent) as member:
        pass
    ear = Ear()
    link = client(member, ear)
    link.start()
    await until(lambda: bool(ear.calls))
    assert "cannot connect" in ear.reason()


async def test_closing_before_the_first_turn_is_told() -> None:
    ear = Ear()
    link = client(Member("one", "127.0.0.1", 1), ear)
    link.start()
    await link.close()
    assert ear.reason() == "closed"


async def test_a_replica_that_falls_silent_is_lost_and_one_that_reports_is_not() -> None:
    async def reports_for_a_while(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        for _ in range(8):
            await asyncio.sleep(0.1)
            writer.write(wire.encode(FRAME))
        await reader.read()

    async with replica(reports_for_a_while) as member:
        ear = Ear()
        link = client(member, ear, silence_max_s=0.4)
        link.start()
        await until(lambda: "lost" in ear.names())
        assert ear.names().count("frame") == 8
        assert "nothing heard for" in ear.reason()
        await link.close()


async def test_a_replica_that_does_not_read_gets_a_bounded_amount() -> None:
    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(30.0)

    async with replica(deaf) as member:
        ear = Ear()
        link = client(member, ear, unsent_bytes_max=200_000)
        link.start()
        await until(lambda: link.connected)
        sent = 0
        while link.submit([make_request(sent, tokens=20_000)]):
            sent += 1
            assert sent < 2000
            await asyncio.sleep(0)
        assert sent > 3
        assert link.connected
        await link.close()


async def test_a_big_batch_is_cut_into_frames_a_replica_takes() -> None:
    heard: list[Submit] = []

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        while True:
            message = wire.decode_to_replica(await wire.read_body(reader, 16 * 1024 * 1024))
            assert isinstance(message, Submit)
            heard.append(message)

    async with replica(behave) as member:
        ear = Ear()
        link = client(member, ear)
        link.start()
        await until(lambda: link.connected)
        assert link.submit([make_request(attempt, tokens=600_000) for attempt in range(8)])
        await until(lambda: sum(len(each.requests) for each in heard) == 8)
        assert len(heard) == 4
        assert [request.attempt for each in heard for request in each.requests] == list(range(8))
        await link.close()


async def test_tls_at_both_ends(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    names = ["-subj", "/CN=replica", "-addext", "subjectAltName=IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command = ["openssl", "req", "-x509", *curve, "-nodes", "-days", "2", "-keyout", str(key), "-out", str(certificate), *names]
    try:
        await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no openssl, or it cannot make the certificate this test needs")
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        writer.write(wire.encode(FRAME))
        await reader.read()

    async with replica(behave, ours) as member:
        ear = Ear()
        link = client(member, ear, tls=trusting)
        link.start()
        await until(lambda: "frame" in ear.names())
        await link.close()
        stranger = Ear()
        link = client(member, stranger, tls=ssl.create_default_context())  # does not know the certificate
        link.start()
        await until(lambda: "lost" in stranger.names())
        assert "certificate" in stranger.reason()


def test_reconnecting_backs_off_within_bounds() -> None:
    delays = [reconnect_delay_s(failures, 0.0) for failures in range(1, 40)]
    assert delays == sorted(delays)
    assert delays[0] == FIRST_S / 2
    assert delays[-1] == LARGEST_S / 2
    assert reconnect_delay_s(1_000_000, 0.999999) < LARGEST_S
    assert reconnect_delay_s(3, 0.1) != reconnect_delay_s(3, 0.9)


async def test_the_fake_keeps_the_same_contract() -> None:
    ear = Ear()
    fake = FakeLink("one", ear)
    link: Link = fake
    assert not link.submit([make_request(1)])
    fake.welcome(WELCOME)
    assert link.submit([make_request(1)])
    assert link.cancel([1])
    assert link.want_snapshot()
    fake.frame(FRAME)
    fake.accepting = False
    assert not link.submit([make_request(2)])
    await link.close()
    await link.close()
    assert ear.names() == ["connected", "frame", "lost"]
    assert [each.attempt for each in fake.submitted] == [1]
    assert (fake.cancelled, fake.snapshots_wanted) == ([1], 1)


def test_a_client_is_a_link() -> None:
    link: Link = client(Member("one", "127.0.0.1", 1), Ear())
    assert not link.connected
