"""Ready means that HAProxy asks a router first, not Serve's Python proxy."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from cluster.haproxy_state import first_choice_is_up, has_first_choice

HEAD = "# pxname,svname,qcur,status,weight,act,bck,\n"
BACKUP = "app,PROXY,0,UP,1,0,1,\n"
SUMS = "http_frontend,FRONTEND,,OPEN,,,,\ndefault_backend,BACKEND,0,UP,0,0,0,\napp,BACKEND,0,UP,1,1,1,\n"


@pytest.mark.parametrize(
    ("servers", "known"),
    [
        ("", False),
        (BACKUP, False),
        (BACKUP + "app,SERVE_REPLICA-1,0,DOWN,1,1,0,\n", False),
        (BACKUP + "app,SERVE_REPLICA-1,0,UP,1,1,0,\n", True),
        ("app,SERVE_REPLICA-1,0,UP 1/2,1,1,0,\n", True),
    ],
)
def test_a_server_that_is_up_and_no_backup(servers: str, known: bool) -> None:
    assert has_first_choice(HEAD + servers + SUMS) is known


def test_it_is_asked_on_its_socket(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    assert not first_choice_is_up(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(100) == b"show stat\n"
                connection.sendall((HEAD + "app,SERVE_REPLICA-1,0,UP,1,1,0,\n" + SUMS).encode())

        thread = threading.Thread(target=answer)
        thread.start()
        assert first_choice_is_up(path)
        thread.join()
