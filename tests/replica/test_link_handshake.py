"""The door of a replica: who gets in, who does not, and what a stranger can do to the others (nothing)."""

from __future__ import annotations

import asyncio

import pytest

from replica.contract import wire
from replica.contract.messages import PROTOCOL_VERSION, Cancel, Challenge, Hello, Refused, Submit, WantSnapshot, Welcome
from replica.link import Incarnation, LinkLimits, LinkServer
from tests.replica.link_fakes import SECRET, RawRouter, replica, request, until


async def refusal(address: tuple[str, int], **changes: object) -> str:
    """Say hello with something wrong; the reason given. The connection must close."""
    router = await RawRouter.connect(address)
    challenge = await router.read()
    assert isinstance(challenge, Challenge)
    router_id = str(changes.get("router_id", "router-1"))
    mac = wire.handshake_mac(bytes(changes.get("secret", SECRET)), challenge.nonce, router_id)  # type: ignore[call-overload]
    router.write(Hello(int(changes.get("protocol", PROTOCOL_VERSION)), router_id, bytes(changes.get("mac", mac))))  # type: ignore[call-overload]
    answer = await router.read()
    assert isinstance(answer, Refused), answer
    assert await router.is_closed()
    return answer.reason


async def test_the_right_secret_is_welcome() -> None:
    async with replica() as here:
        router = await RawRouter.join(here.address)
        welcome = router.welcome
        assert (welcome.replica_id, welcome.epoch, welcome.fingerprint) == ("replica-1", 77, "fingerprint")
        assert welcome.limits == here.runner.limits
        assert welcome.load.free_blocks == 256
        router.close()


async def test_wrong_hellos_are_refused_with_a_reason() -> None:
    async with replica() as here:
        assert await refusal(here.address, secret=b"another secret") == "wrong secret"
        assert await refusal(here.address, mac=b"") == "wrong secret"
        assert await refusal(here.address, protocol=2) == "protocol 2, this replica speaks 1"
        assert "router_id" in await refusal(here.address, router_id="")
        assert "router_id" in await refusal(here.address, router_id="x" * 300)
        assert here.link.fanout.routers == {}


async def test_the_guard_is_the_mac_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "mac_is_valid", lambda *_: True)
    async with replica() as here:
        (await RawRouter.join(here.address, secret=b"another secret")).close()


async def test_a_mac_cannot_be_replayed() -> None:
    async with replica() as here:
        first = await RawRouter.connect(here.address)
        challenge = await first.read()
        assert isinstance(challenge, Challenge)
        hello = Hello(PROTOCOL_VERSION, "router-1", wire.handshake_mac(SECRET, challenge.nonce, "router-1"))
        first.write(hello)
        assert isinstance(await first.read(), Welcome)
        second = await RawRouter.connect(here.address)
        await second.read()
        second.write(hello)
        assert isinstance(await second.read(), Refused)
        first.close()
        second.close()


async def test_no_hello_in_time_is_refused() -> None:
    async with replica(limits=LinkLimits(handshake_timeout_s=0.1)) as here:
        router = await RawRouter.connect(here.address)
        await router.read()
        answer = await router.read()
        assert isinstance(answer, Refused)
        assert answer.reason == "no hello in time"
        assert await router.is_closed()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" * 64,
        (5000).to_bytes(4, "little") + b"x" * 5000,  # a stranger's frame above 4 KiB
        (3).to_bytes(4, "little") + b"\xc1\xc1\xc1",
        wire.encode(Submit(requests=(request(1),))),
        wire.encode(Cancel(attempts=(1,))),
        wire.encode(WantSnapshot()),
    ],
)
async def test_a_stranger_who_does_not_say_hello_is_cut(data: bytes) -> None:
    async with replica() as here:
        good = await RawRouter.join(here.address)
        stranger = await RawRouter.connect(here.address)
        stranger.writer.write(data)
        assert await stranger.is_closed()
        assert here.engine.submitted == []
        good.write(Submit(requests=(request(1, max_tokens=3),)))
        await good.frame(lambda frame: any(delta.finish for delta in frame.deltas))
        good.close()


async def test_an_oversized_frame_is_cut_before_it_is_read() -> None:
    async with replica() as here:
        stranger = await RawRouter.connect(here.address)
        await stranger.read()
        stranger.writer.write((wire.MAX_FRAME_BYTES).to_bytes(4, "little"))  # only the announcement
        assert await stranger.is_closed()


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", (2).to_bytes(4, "little") + b"\x93\xa3", wire.encode(Hello(1, "again", b""))])
async def test_a_router_that_sends_garbage_is_cut_and_its_work_cancelled(data: bytes) -> None:
    async with replica() as here:
        bad, good = await RawRouter.join(here.address, "bad"), await RawRouter.join(here.address, "good")
        bad.write(Submit(requests=(request(1),)))
        good.write(Submit(requests=(request(1),)))
        await bad.frame(lambda frame: bool(frame.deltas))
        bad.writer.write(data)
        assert await bad.is_closed()
        await until(lambda: len(here.engine.live) == 1)
        await good.frame(lambda frame: bool(frame.deltas))  # the engine and the other router go on
        assert here.loop.pulse().alive
        good.close()


async def test_strangers_and_routers_are_bounded() -> None:
    async with replica(limits=LinkLimits(strangers_max=2, routers_max=2)) as here:
        strangers = [await RawRouter.connect(here.address) for _ in range(2)]
        for stranger in strangers:
            assert isinstance(await stranger.read(), Challenge)
        third = await RawRouter.connect(here.address)
        answer = await third.read()
        assert isinstance(answer, Refused)
        assert answer.reason == "too many connections"
        for stranger in [*strangers, third]:
            stranger.close()
        await until(lambda: not here.link._strangers)
        routers = [await RawRouter.join(here.address, f"router-{index}") for index in range(2)]
        assert isinstance(await (await RawRouter.connect(here.address)).read(), Refused)
        for router in routers:
            router.close()


async def test_a_router_that_comes_again_replaces_itself() -> None:
    async with replica() as here:
        before = await RawRouter.join(here.address)
        before.write(Submit(requests=(request(1),)))
        await before.frame(lambda frame: bool(frame.deltas))
        after = await RawRouter.join(here.address)
        assert await before.is_closed()
        await until(lambda: not here.engine.live)
        after.write(Submit(requests=(request(1, max_tokens=2),)))  # the same number, on another connection: another attempt
        await after.frame(lambda frame: any(delta.finish for delta in frame.deltas))
        after.close()


async def test_an_empty_secret_is_refused() -> None:
    async with replica() as here:
        me = Incarnation("r", 1, "m", "", "", here.runner.limits)
        with pytest.raises(ValueError, match="secret"):
            LinkServer(me, here.loop.inbox, here.engine.load(), b"")
        await asyncio.sleep(0)
