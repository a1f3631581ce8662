"""From Ray's messages, tracebacks and all, to the one line that a user can act on."""

from __future__ import annotations

import pytest

from cluster.config import parse
from cluster.deployment import failure, public_url

TRACEBACK = """Failed to update the deployments ['Replica'].
ray::ServeReplica:smollm2:Replica.initialize_and_get_metadata() (pid=1, ip=10.0.0.1)
  File "replica/runner.py", line 31, in __init__
    raise {error}
"""


@pytest.mark.parametrize(
    ("error", "line", "see_logs"),
    [
        ("replica.contract.model_error.ModelError: size 2 does not divide: 1, 3", "size 2 does not divide: 1, 3", False),
        ("ValueError: max_model_len 8192 does not fit", "max_model_len 8192 does not fit", False),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory", "OutOfMemoryError: CUDA out of memory", True),
    ],
)
def test_the_last_exception_is_what_counts(error: str, line: str, see_logs: bool) -> None:
    found = failure(["The deployments are unhealthy.", TRACEBACK.replace("    raise {error}", error)])
    assert (str(found), found.see_logs) == (line, see_logs)


def test_why_haproxy_ended_is_said() -> None:
    notices = "RuntimeError: HAProxy crashed during startup: [NOTICE] (7) : v2\n[ALERT] (7) : cannot bind socket for [0.0.0.0:8000]\n"
    assert "cannot bind socket for [0.0.0.0:8000]" in str(failure([notices]))


def test_a_message_without_an_exception_is_said_as_it_is() -> None:
    assert str(failure(["", "the cluster is full"])) == "the cluster is full"
    assert str(failure([])) == "the application failed to start"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
    ],
)
def test_the_url_can_be_opened_as_printed(host: str, url: str) -> None:
    assert public_url(parse({"serve": {"host": host}})) == url
