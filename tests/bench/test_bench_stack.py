"""Starting and ending a stack, shown on a stand-in for the server: nothing may be left, and what is left is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import processes, stack

SERVER = """
import http.server, signal, subprocess, sys
port, mode = int(sys.argv[2]), sys.argv[3]
if mode == "broken":
    sys.exit("this stack is broken")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
def stop(*_):
    if mode == "clean":
        child.kill(); child.wait()
    raise SystemExit(0)
signal.signal(signal.SIGTERM, stop)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    return [sys.executable, str(script)]


def test_a_clean_stop_leaves_nothing(command: list[str]) -> None:
    running = stack.start(["clean"], command=command, timeout_s=30)
    family = running.processes()
    assert len(family) == 2
    assert stack.is_ready(running.url) and stack.get_status(f"{running.url}/nothing") == 404
    assert running.stop() == []
    assert processes.alive(family) == []
    assert stack.get_status(f"{running.url}/ready") is None


def test_an_orphan_is_named_and_killed(command: list[str]) -> None:
    """The control of every 'leaves no process': a child that outlives its parent is found."""
    running = stack.start(["careless"], command=command, timeout_s=30)
    left = running.stop()
    assert len(left) == 1 and "time.sleep(300)" in left[0].title
    assert running.leftovers() == []


def test_a_stack_that_dies_says_why(command: list[str]) -> None:
    with pytest.raises(stack.StackError, match="exit code 1\nthis stack is broken"):
        stack.start(["broken"], command=command, timeout_s=30)


def test_a_log_is_in_no_folder(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is killed while it measures leaves no file behind."""
    logs = tmp_path / "logs"
    logs.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(logs))
    running = stack.start(["clean"], command=command, timeout_s=30)
    try:
        assert list(logs.iterdir()) == [] and running.log_tail() == ""
    finally:
        running.stop()
