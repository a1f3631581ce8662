"""What the wrapper mends in the HAProxy that Serve starts, shown by that HAProxy itself."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cluster.environment import find_haproxy
from cluster.mortal import HEADER_SECONDS_MAX, ROUTER_GONE, mortal

CLIENTS = 10
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"


@pytest.fixture(scope="module")
def binary() -> Path:
    found = find_haproxy()
    if found is None:
        pytest.skip("there is no HAProxy that runs on this machine (cluster.environment.find_haproxy says which are tried)")
    return found


def as_serve_writes(port: int, router: int | None) -> str:
    """Those of its lines that matter."""
    route = "" if router is None else "    use_backend app if { path_beg / }\n"
    app = "" if router is None else f"backend app\n    http-reuse always\n    server one 127.0.0.1:{router}\n"
    return (
        "global\n    maxconn 100\n    nbthread 1\ndefaults\n    mode http\n    timeout connect 5s\n    timeout client 3600s\n"
        "    timeout server 3600s\n    option abortonclose\n    option splice-request\n    option splice-response\n"
        f"frontend http_frontend\n    bind 127.0.0.1:{port}\n{route}    default_backend default_backend\n"
        "backend default_backend\n    http-request return status 404 content-type text/plain lf-string \"Path '%[path]' not found.\"\n"
        f"{app}"
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(program: Path, directory: Path, router: int | None) -> Iterator[int]:
    """The port it listens on."""
    port, config = free_port(), directory / "haproxy.cfg"
    config.write_text(as_serve_writes(port, router))
    process = subprocess.Popen([program, "-db", "-f", config], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline and process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.02)
        assert process.poll() is None, process.stderr and process.stderr.read()
        yield port
    finally:
        process.terminate()
        process.wait(10)
        assert process.stderr is not None
        process.stderr.close()


def unnoticed(program: Path, directory: Path) -> int:
    """Of so many clients whose body came after their headers, and who left before they were answered, how many HAProxy still serves."""
    with ExitStack() as opened:
        router = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        router.settimeout(10.0)
        port = opened.enter_context(running(program, directory, router.getsockname()[1]))
        served: list[socket.socket] = []
        clients: list[socket.socket] = []
        for _ in range(CLIENTS):
            clients.append(socket.create_connection(("127.0.0.1", port)))
            clients[-1].sendall(HEAD)
            served.append(opened.enter_context(router.accept()[0]))
            time.sleep(0.02)
            clients[-1].sendall(b"body")
        time.sleep(0.3)
        for client in clients:
            client.close()
        deadline_s = time.monotonic() + 1.0
        return sum(not ends(one, deadline_s) for one in served)


def ends(one: socket.socket, deadline_s: float) -> bool:
    try:
        one.settimeout(max(0.01, deadline_s - time.monotonic()))
        while one.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_a_client_that_leaves_before_its_answer_is_noticed(binary: Path, tmp_path: Path) -> None:
    assert unnoticed(mortal(binary, tmp_path / "wrapper"), tmp_path) == 0


def test_without_the_wrapper_it_is_not(binary: Path, tmp_path: Path) -> None:
    assert unnoticed(binary, tmp_path) > 0


def answer(port: int, request: bytes) -> tuple[bytes, bytes]:
    """Status line and body."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(request)
        client.settimeout(5.0)
        received = b""
        while chunk := client.recv(4096):
            received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0], body


@pytest.mark.parametrize("wrapped", [True, False])
def test_before_it_knows_a_router_it_does_not_say_that_there_is_no_such_path(binary: Path, tmp_path: Path, wrapped: bool) -> None:
    program = mortal(binary, tmp_path / "wrapper") if wrapped else binary
    with running(program, tmp_path, router=None) as port:
        status, body = answer(port, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (b" 503 " in status) is wrapped
        if wrapped:
            assert body == ROUTER_GONE.partition(b"\r\n\r\n")[2]
            assert json.loads(body)["error"]["code"] == "router_gone"
        nowhere, _ = answer(port, b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b" 404 " in nowhere


def test_headers_have_their_time_and_mending_twice_changes_nothing(tmp_path: Path) -> None:
    page, config = tmp_path / "500.http", tmp_path / "haproxy.cfg"
    page.write_text("HTTP/1.1 500 Internal Server Error\r\n\r\nInternal Server Error")
    config.write_text(as_serve_writes(1, None))
    wrapper = mortal(Path("/bin/echo"), tmp_path / "haproxy")
    ran = subprocess.run([wrapper, "-db", "-f", config], check=True, capture_output=True, text=True)
    assert ran.stdout == f"-dS -db -f {config}\n"
    assert page.read_bytes() == ROUTER_GONE
    once = config.read_text()
    assert f"defaults\n    timeout http-request {HEADER_SECONDS_MAX}s\n" in once
    subprocess.run([wrapper, "-db", "-f", config], check=True, capture_output=True)
    assert config.read_text() == once
    page.unlink()
    subprocess.run([wrapper, "-v"], check=True, capture_output=True)
    assert not page.exists()
