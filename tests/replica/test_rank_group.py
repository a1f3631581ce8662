"""What ranks tell one another before they compute: cards, refusals, interfaces. All in threads or without a group of torch's."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import pytest
import torch

from replica.contract.wire import handshake_mac
from replica.parallel import interface, step_channel
from replica.parallel.card import card, decode, difference, encode
from replica.parallel.interface import InterfaceError, choose_interface
from replica.parallel.step_channel import GroupBroken, Leader, Peer, follow

SECRET = b"of the group"
CARD = {"weights": "ab12", "dtype": torch.float32, "kernels": "reference", "num_blocks": 64, "block_size": 16, "max_model_len": 512}


class MemoryStore:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            self.changed.wait_for(lambda: key in self.values, timeout=20)
            return self.values[key]


def channel(size: int, visit: Any = None, timeout_s: float = 20.0) -> tuple[Leader, list[Peer]]:
    """Both ends of a group of `size`. `visit(host, port)` comes before the ranks do."""
    store = MemoryStore()
    peers: dict[int, Peer] = {}

    def come() -> None:
        host, port = store.get("rantang/steps").decode().split()
        if visit is not None:
            visit(host, int(port))
        for rank in range(1, size):
            peers[rank] = follow(store, rank, SECRET, timeout_s)

    thread = threading.Thread(target=come)
    thread.start()
    try:
        leader = Leader(store, size, "127.0.0.1", SECRET, timeout_s)
    finally:
        thread.join()
    return leader, [peers[rank] for rank in range(1, size)]


def test_messages_of_every_size_arrive_in_order() -> None:
    leader, peers = channel(3)
    messages = [b"", b"x", b"y" * 70_000, b"z" * 3_000_000]
    sender = threading.Thread(target=lambda: [leader.send(message) for message in messages])
    sender.start()
    for peer in peers:
        assert [peer.receive(20) for _ in messages] == messages
    sender.join()
    for rank, peer in enumerate(peers, start=1):
        peer.send(b"from %d" % rank)
    assert [peer.receive(20) for peer in leader.peers] == [b"from 1", b"from 2"]
    leader.close()
    for peer in peers:
        with pytest.raises(GroupBroken, match="rank 0 is gone: the connection is closed"):
            peer.receive(20)


def test_a_peer_that_leaves_is_named_and_one_that_is_silent_has_a_deadline() -> None:
    leader, peers = channel(3)
    began_s = time.monotonic()
    with pytest.raises(GroupBroken, match=r"rank 1 said nothing for 0\.2 s"):
        leader.peers[0].receive(0.2)
    assert time.monotonic() - began_s >= 0.2
    peers[1].close()
    with pytest.raises(GroupBroken, match="rank 2 is gone"):
        leader.peers[1].receive(20)


def test_strangers_are_no_ranks() -> None:
    """Neither a wrong proof, nor one of another connection, nor one that says nothing takes a rank's place, or keeps the ranks away."""

    def visit(host: str, port: int) -> None:
        for secret, nonce in ((b"a guess", None), (SECRET, b"n" * 32)):
            with socket.create_connection((host, port), timeout=20) as one:
                told = one.recv(32)
                one.sendall((1).to_bytes(4, "little") + handshake_mac(secret, nonce or told, "rank 1"))
                assert one.recv(1) == b""
        socket.create_connection((host, port)).close()

    leader, peers = channel(2, visit)
    leader.send(b"hello")
    assert peers[0].receive(20) == b"hello"


def test_a_stranger_that_trickles_has_one_deadline_for_all_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_channel, "_GREETING_TIMEOUT_S", 0.4)
    trickled: list[int] = []

    def visit(host: str, port: int) -> None:
        with socket.create_connection((host, port), timeout=20) as one, contextlib.suppress(OSError):  # cut off
            for count in range(30):
                one.sendall(b"x")
                trickled.append(count)
                time.sleep(0.1)

    leader, peers = channel(2, visit)
    leader.send(b"hello")
    assert peers[0].receive(20) == b"hello"
    assert len(trickled) < 30


def test_strangers_without_end_do_not_put_the_deadline_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_channel, "_GREETING_TIMEOUT_S", 0.01)
    store, over = MemoryStore(), threading.Event()

    def visit() -> None:
        host, port = store.get("rantang/steps").decode().split()
        until_s = time.monotonic() + 10
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:  # refused in the end: the listener is closed
            while not over.is_set() and time.monotonic() < until_s:
                held.enter_context(socket.create_connection((host, int(port)), timeout=5))
                time.sleep(0.005)

    thread = threading.Thread(target=visit)
    thread.start()
    began_s = time.monotonic()
    with pytest.raises(GroupBroken, match="have not come"):
        Leader(store, 2, "127.0.0.1", SECRET, 0.3)
    took_s = time.monotonic() - began_s
    over.set()
    thread.join()
    assert took_s < 8


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(GroupBroken, match=r"rank\(s\) 1, 2 have not come to 127.0.0.1 within 0.1 s"):
        Leader(MemoryStore(), 3, "127.0.0.1", SECRET, 0.1)


def test_an_address_that_is_not_here_is_named() -> None:
    with pytest.raises(GroupBroken, match=r"rank 0 cannot listen on 192.0.2.1: "):
        Leader(MemoryStore(), 2, "192.0.2.1", SECRET, 1.0)
    store = MemoryStore()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        store.set("rantang/steps", f"127.0.0.1 {closed.getsockname()[1]}")
        with pytest.raises(GroupBroken, match=r"rank 1 cannot reach rank 0 at 127.0.0.1:\d+: Connection refused"):
            follow(store, 1, SECRET, 1.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": "cd34"}, "rank 2 differs from rank 0: weights 'cd34' (rank 0: 'ab12')"),
        (
            {"dtype": torch.bfloat16, "num_blocks": 63},
            "rank 2 differs from rank 0: dtype 'bfloat16' (rank 0: 'float32'), num_blocks 63 (rank 0: 64)",
        ),
    ],
)
def test_cards_that_differ_name_the_rank_and_the_field(change: dict[str, Any], said: str) -> None:
    same, other = card(**CARD), card(**{**CARD, **change})
    assert decode(encode(same)) == same
    assert difference([same, same, other]) == said
    assert difference([same, same, same]) == ""


def test_the_interface_is_the_one_of_the_address_unless_the_user_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (interface.GLOO, interface.NCCL):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    choose_interface("127.0.0.1")
    assert interface.os.environ[interface.GLOO] == "lo" and interface.os.environ[interface.NCCL] == "=lo"
    monkeypatch.setenv(interface.GLOO, "nope0")
    with pytest.raises(InterfaceError, match=r"GLOO_SOCKET_IFNAME=nope0: no interface 'nope0' here \(there are lo"):
        choose_interface("127.0.0.1")
    monkeypatch.setenv(interface.GLOO, "lo")
    monkeypatch.setenv(interface.NCCL, "^lo")
    choose_interface("127.0.0.1")
    assert (interface.os.environ[interface.GLOO], interface.os.environ[interface.NCCL]) == ("lo", "^lo")


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 7, 64])
def test_messages_arrive_whole_however_their_bytes_come(cut: int) -> None:
    """One by one, several at once, or a part of one behind another."""
    sent = [b"", b"a", b"of two kilobytes" * 128, b"", b"end"]
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sender:
        receiver = Peer(listener.accept()[0], "rank 1")
        stream = b"".join(len(each).to_bytes(4, "little") + each for each in sent)

        def trickle() -> None:
            for begin in range(0, len(stream), cut * 16):
                sender.sendall(stream[begin : begin + cut])
                time.sleep(0.0005)
                sender.sendall(stream[begin + cut : begin + cut * 16])

        thread = threading.Thread(target=trickle)
        thread.start()
        assert [receiver.receive(10.0) for _ in sent] == sent
        thread.join()
        receiver.close()
