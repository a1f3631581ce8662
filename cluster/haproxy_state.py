"""What HAProxy says of its servers, asked on its own socket: is a router its first choice yet?

For some seconds after the routers are ready, HAProxy knows only Serve's Python proxy, the backup. A connection opened then
would go through it, token by token, until it is closed.
"""

from __future__ import annotations

import csv
import socket
from pathlib import Path

_TIMEOUT_S = 2.0
_ANSWER_BYTES_MAX = 4 * 1024 * 1024
_NO_SERVERS = ("FRONTEND", "BACKEND")


def first_choice_is_up(path: Path) -> bool:
    """False as well when nobody answers at `path`."""
    try:
        return has_first_choice(_ask(path, b"show stat\n"))
    except OSError:
        return False


def has_first_choice(page: str) -> bool:
    """In the CSV of `show stat`: a server that is up and no backup."""
    rows = csv.DictReader(page.removeprefix("# ").splitlines())
    return any(
        row.get("svname") not in _NO_SERVERS and row.get("bck") == "0" and (row.get("status") or "").startswith("UP") for row in rows
    )


def _ask(path: Path, question: bytes) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(str(path))
        connection.sendall(question)
        answer = bytearray()
        while len(answer) < _ANSWER_BYTES_MAX and (chunk := connection.recv(65_536)):
            answer += chunk
    return answer.decode(errors="replace")
