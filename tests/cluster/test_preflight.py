"""A port is taken once, also by those who would share it; a model whose texts cannot be read is refused."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import gguf
import pytest

from cluster import preflight
from cluster.config import Config
from cluster.preflight import StartError, find_cluster, find_model, take_port
from tests.replica.tiny_gguf import write_llama_gguf
from tests.replica.tiny_llama import write_tiny_llama
from tests.router.smollm2 import gguf_path


def shared_listener(port: int) -> socket.socket:
    """As HAProxy listens."""
    one = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        one.setsockopt(socket.SOL_SOCKET, option, 1)
    one.bind(("127.0.0.1", port))
    one.listen()
    return one


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "RELEASE_S", 0.0)


@pytest.mark.usefixtures("at_once")
def test_a_port_that_a_haproxy_shares_is_taken() -> None:
    port = free_port()
    with shared_listener(port):
        with shared_listener(port):
            pass  # the control: two who share it do not notice each other
        with pytest.raises(StartError, match=f"port {port} on 127.0.0.1 is taken"):
            take_port("127.0.0.1", port)


@pytest.mark.parametrize("patient", [True, False])
def test_a_port_that_is_given_back_late_is_waited_for(patient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a HAProxy that was killed a moment ago; and the control: whoever asks once is told that it is taken."""
    monkeypatch.setattr(preflight, "RELEASE_S", 30.0 if patient else 0.0)
    port = free_port()
    listener, asked = shared_listener(port), []
    monkeypatch.setattr(preflight.time, "sleep", lambda _: (asked.append(1), listener.close()))
    with listener:
        if patient:
            take_port("127.0.0.1", port).close()
        else:
            with pytest.raises(StartError, match="is taken"):
                take_port("127.0.0.1", port)
    assert len(asked) == patient


@pytest.mark.usefixtures("at_once")
def test_a_port_that_is_held_is_taken_before_anyone_listens() -> None:
    """Two that start at the same time: the second is told, although the HAProxy of the first does not run yet."""
    port = free_port()
    with take_port("127.0.0.1", port):
        with pytest.raises(StartError, match="is taken"):
            take_port("127.0.0.1", port)
        with shared_listener(port) as own, socket.create_connection(("127.0.0.1", port), timeout=5):
            own.settimeout(5)
            own.accept()[0].close()  # and every connection comes to the HAProxy
    take_port("127.0.0.1", port).close()


def found(model: Path, runner: str = "model") -> bool:
    return find_model(Config.model_validate({"engine": {"model": str(model), "runner": runner}})) is not None


def refused(model: Path, runner: str = "model") -> str:
    with pytest.raises(StartError) as caught:
        found(model, runner)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("runner", ["model", "mock"])
def test_a_tokenizer_that_cannot_be_read_is_refused_before_anything_starts(tmp_path: Path, runner: str) -> None:
    """The weights are sound: only the routers would have noticed, with everything running."""
    assert found(gguf_path(), runner) is (runner == "model"), "the control"
    write_llama_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32)
    assert "GGUF tokenizer None with pre-tokenizer 'gpt-2' is not supported" in refused(tmp_path / "model.gguf", runner)
    checkpoint = write_tiny_llama(tmp_path / "checkpoint")
    assert "tokenizer.json does not exist" in refused(checkpoint, runner)
    (checkpoint / "tokenizer.json").write_text("{}")
    assert "tokenizer.json is not a readable tokenizer" in refused(checkpoint, runner)


def test_a_template_that_cannot_be_read_is_refused_too(tmp_path: Path) -> None:
    header = gguf_path().read_bytes()
    start = header.index(b"{%", header.index(b"tokenizer.chat_template"))
    shutil.copy(gguf_path(), tmp_path / "model.gguf")
    with (tmp_path / "model.gguf").open("r+b") as file:
        file.seek(start)
        file.write(b"{!")
    assert "chat template does not compile" in refused(tmp_path / "model.gguf")


def test_a_cluster_that_does_not_answer_is_said_at_once() -> None:
    port = free_port()
    with pytest.raises(StartError, match=f"no Ray cluster answers at 127.0.0.1:{port}: Connection refused"):
        find_cluster(f"127.0.0.1:{port}")
    with pytest.raises(StartError, match=r"no Ray cluster answers at 127\.0\.0\.1:99999"):
        find_cluster("127.0.0.1:99999")
    with shared_listener(port):
        find_cluster(f"127.0.0.1:{port}")  # the control: whoever listens is asked by Ray


@pytest.mark.parametrize("address", ["auto", "local", "ray://127.0.0.1:1"])
def test_addresses_of_other_forms_are_left_to_ray(address: str) -> None:
    find_cluster(address)
