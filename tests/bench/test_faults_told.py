"""Every request that failed says why in the result's own file, and a server that is not to be measured is not."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.connection import Target
from bench.load_client import LoadClient
from bench.mock_openai import Fault, Pace
from bench.record import Outcome, RequestRecord
from bench.request_log import RequestRow, row_of
from bench.server import ServerOptions, open_server
from bench.stack import StackError
from tests.bench.mock_pair import StartPair
from tests.bench.test_load_client import one_call


def row(record: RequestRecord) -> RequestRow:
    return row_of(record, point=0, repeat=0, start_s=0.0, accepted=False)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault.NONE, ""),
        (Fault.SHED, "status 429: busy"),
        (Fault.HANG_AT_ONCE, "timeout"),
        (Fault.ERROR_EVENT, "error event: lost"),
        (Fault.TWO_FINISHES, "second finish"),
    ],
)
async def test_a_row_says_what_went_wrong(pair: StartPair, fault: Fault, said: str) -> None:
    mock = await pair(fault=fault, pace=Pace(token_ms=1), timeout_s=1.0)
    assert row(await mock.client.send(one_call())).fault == said


def test_who_hung_up_on_schedule_is_no_fault() -> None:
    assert row(RequestRecord(0.0, outcome=Outcome.CANCELLED, problems=["no finish"])).fault == ""


@contextmanager
def serving(ready: int, status: int = 200, location: str = "") -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(ready if self.path == "/ready" else 404)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(status)

        def answer(self, status: int) -> None:
            self.send_response(status)
            if location:
                self.send_header("Location", location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_server_that_is_starting_is_not_measured() -> None:
    with (
        serving(ready=503) as url,
        pytest.raises(StackError, match="is not ready yet: /ready answers 503"),
        open_server(ServerOptions(url)),
    ):
        pass
    for other in (200, 404, 500):  # the control: ready, or one that has no such page
        with serving(ready=other) as url, open_server(ServerOptions(url)) as server:
            assert server.url == url


async def test_where_an_answer_moved_to_is_said_and_not_followed() -> None:
    with serving(200, status=308, location="https://elsewhere.example/v1") as url:
        client = LoadClient(Target.parse(url))
        record = await client.send(one_call())
        client.close()
    assert record.outcome is Outcome.ERROR
    assert record.fault == "status 308; redirected to https://elsewhere.example/v1, which is not followed: give that URL"
