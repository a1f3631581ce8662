"""The client counts exactly, sees lies, and never hides a stall."""

from __future__ import annotations

import asyncio
import time

import pytest

from bench import answer, load_client
from bench.answer import AnswerReader, Expectation
from bench.arrivals import evenly
from bench.load_client import Call, closed_loop, json_call, open_loop
from bench.mock_openai import Fault, Pace
from bench.prompt_style import PromptStyle, completion
from bench.quantiles import quantile
from bench.record import Outcome, RequestRecord
from bench.refusal_reason import reason_of
from bench.summary import summarize
from bench.works import Work, calls_of
from tests.bench.mock_pair import StartPair

STYLE = PromptStyle("mock")


def one_call(tokens: int = 8) -> Call:
    return completion(list(range(1000, 1016)), tokens, STYLE)


async def test_closed_loop_counts_every_token_and_keeps_the_streams(pair: StartPair) -> None:
    mock = await pair(pace=Pace(token_ms=1))
    work = Work("x", streams=4, prompt_tokens=16, output_tokens=10, requests=13)
    records = await closed_loop(mock.client, calls_of(work, STYLE, 0), streams=4)
    assert [record.outcome for record in records] == [Outcome.COMPLETED] * 13
    assert all(
        record.tokens_seen == 10 and record.counts.completion_tokens == 10 and record.counts.prompt_tokens == 16 for record in records
    )
    assert all(list(record.chunk_times_s) == sorted(record.chunk_times_s) for record in records)
    assert mock.client.tokens_received == 130 == summarize(records).output_tokens
    assert mock.server.served == 13


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_counts_with_and_without_token_ids(pair: StartPair, path: str, ids: bool) -> None:
    mock = await pair(pace=Pace(send_ids=ids))
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True, "return_token_ids": True}
    record = await mock.client.send(json_call(path, body, Expectation(completion_tokens=5, keep=True)))
    assert record.outcome is Outcome.COMPLETED, record.problems
    assert record.answer.texts == {0: " t0 t1 t2 t3 t4"}
    assert record.answer.finish_reasons == {0: "length"}
    assert record.answer.token_ids == ({0: [1000, 1001, 1002, 1003, 1004]} if ids else {})


@pytest.mark.parametrize(("fault", "problem"), [(Fault.GOES_ON, "data after [DONE]"), (Fault.STAYS_OPEN, "no end after [DONE]")])
async def test_what_goes_on_after_done_holds_nobody(pair: StartPair, monkeypatch: pytest.MonkeyPatch, fault: Fault, problem: str) -> None:
    monkeypatch.setattr(load_client, "END_S", 0.2)
    mock = await pair(fault=fault)
    record = await asyncio.wait_for(mock.client.send(one_call()), 60)  # the client's own limit is ten minutes
    assert (record.outcome, record.problems) == (Outcome.WRONG, [problem])
    mock.server.fault = Fault.NONE
    assert (await mock.client.send(one_call())).outcome is Outcome.COMPLETED, "the control, on a connection of its own"


@pytest.mark.parametrize(("status", "outcome"), [(200, Outcome.WRONG), (400, Outcome.ERROR), (429, Outcome.ERROR)])
@pytest.mark.parametrize("stream", [True, False])
def test_a_body_without_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, status: int, outcome: Outcome, stream: bool) -> None:
    monkeypatch.setattr(answer, "EVENT_MAX_BYTES", 1_000)
    over: list[bool] = []
    record = RequestRecord(0.0)
    reader = AnswerReader(record, Expectation(stream=stream), lambda: over.append(True))
    reader.begun(status, {"content-type": "text/event-stream"}, 0.0)
    reader.received(b"x" * 900, 0.0)
    assert not over, "the control: so much is read"
    reader.received(b"x" * 900, 0.0)
    assert over and record.outcome is outcome and record.problems[0].endswith("too large")
    assert (len(record.refusal.body) > 0) is (status >= 300)


async def test_whole_answer_is_read_too(pair: StartPair) -> None:
    mock = await pair()
    body = {"prompt": [1, 2, 3], "max_tokens": 4}
    record = await mock.client.send(json_call("/v1/completions", body, Expectation(stream=False, prompt_tokens=3, keep=True)))
    assert (record.outcome, record.answer.texts, record.counts.completion_tokens) == (Outcome.COMPLETED, {0: " t0 t1 t2 t3"}, 4)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (Fault.USAGE_TOO_HIGH, "usage says 13 tokens"),
        (Fault.USAGE_TOO_LOW, "usage says 3 tokens"),
        (Fault.NO_DONE, "no [DONE]"),
        (Fault.TWO_FINISHES, "second finish"),
        (Fault.TOKEN_AFTER_FINISH, "token after finish"),
        (Fault.NONSENSE, "not JSON"),
        (Fault.NO_TOKENS, "usage says 8 tokens, 0 came"),
        (Fault.CACHED_TOO_HIGH, "usage says 1000000 cached tokens of 16 in the prompt"),
        (Fault.NONE, ""),  # the control: nothing is wrong, nothing is found
    ],
)
@pytest.mark.parametrize("ids", [True, False])
async def test_a_server_that_lies_is_caught(pair: StartPair, fault: Fault, problem: str, ids: bool) -> None:
    mock = await pair(fault=fault, pace=Pace(send_ids=ids))
    record = await mock.client.send(one_call())
    assert record.outcome is (Outcome.WRONG if problem else Outcome.COMPLETED)
    assert any(problem in text for text in record.problems) or not problem
    summary = summarize([record])
    assert summary.completed + summary.errors == 1
    assert summary.output_tokens == (0 if problem else 8), "a wrong answer lends no speed"


async def test_lower_usage_is_caught_without_an_expected_length(pair: StartPair) -> None:
    mock = await pair(fault=Fault.USAGE_TOO_LOW, pace=Pace(send_ids=False))
    body = {"prompt": "a b", "max_tokens": 8, "stream": True}
    record = await mock.client.send(json_call("/v1/completions", body))
    assert record.problems == ["usage says 3 tokens, at least 8 came"]


async def test_an_end_token_alone_has_no_text(pair: StartPair) -> None:
    mock = await pair(fault=Fault.NO_TOKENS)
    for tokens, problems in ((1, []), (2, ["usage says 2 tokens, 0 came"])):
        record = await mock.client.send(json_call("/v1/completions", {"prompt": "a b", "max_tokens": tokens, "stream": True}))
        assert record.problems == problems


async def test_drop_hang_and_error_event_end_the_request(pair: StartPair) -> None:
    dropped = await (await pair(fault=Fault.DROP_MIDWAY)).client.send(one_call())
    assert (dropped.outcome, dropped.tokens_seen) == (Outcome.ERROR, 4)
    assert dropped.problems == ["connection closed"] or "connection lost" in dropped.problems[0]
    hanging = await pair(fault=Fault.HANG_MIDWAY, timeout_s=0.3)
    assert (await hanging.client.send(one_call())).outcome is Outcome.TIMEOUT
    failed = await (await pair(fault=Fault.ERROR_EVENT)).client.send(one_call())
    assert failed.outcome is Outcome.ERROR
    assert b"lost" in failed.refusal.body
    assert "error event: lost" in summarize([failed]).problems


async def test_a_refusal_says_why(pair: StartPair) -> None:
    mock = await pair()
    records = [await mock.client.send(json_call("/v1/completions", {"max_tokens": value})) for value in ("many", [])]
    (problem,) = summarize(records).problems.items()
    assert problem == ("status 400: Expected `int | null`, got `str` - at `$.max_tokens`", 2), "of the first, and counted together"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error":{"message":"too\\nlong"}}', "too long"),
        (b'{"detail":"no such page"}', "no such page"),
        (b"<html>\x1b[31m502</html>", "<html>[31m502</html>"),
        (b'{"error":{}}', '{"error":{}}'),
        (b"\xff" * 1000, "\ufffd" * 159 + "…"),
        (b"", ""),
    ],
)
def test_the_reason_is_one_short_line(body: bytes, reason: str) -> None:
    assert reason_of(body) == reason


async def test_shed_is_no_error_and_keeps_retry_after(pair: StartPair) -> None:
    mock = await pair(fault=Fault.SHED)
    record = await mock.client.send(one_call())
    assert (record.outcome, record.status, record.refusal.retry_after_s, record.refusal.retry_after_ms) == (Outcome.SHED, 429, 2.0, 1500.0)
    assert b"busy" in record.refusal.body
    summary = summarize([record])
    assert (summary.shed, summary.errors) == (1, 0)


async def test_retry_after_is_obeyed_only_when_asked(pair: StartPair) -> None:
    mock = await pair(obey=True)
    mock.server.retry_after = "Retry-After: 1\r\nretry-after-ms: 100\r\n"
    mock.server.sheds_left = 2
    record = await mock.client.send(one_call())
    assert (record.outcome, record.retries, record.tokens_seen) == (Outcome.COMPLETED, 2, 8)
    assert record.ttft_s is not None and record.ttft_s >= 0.2, "it counts from when it was first due"
    assert record.send_lag_s is not None and record.send_lag_s < 0.1
    assert (summarize([record]).retries, summarize([record]).shed) == (2, 0)
    control = await pair()
    control.server.sheds_left = 2
    assert (await control.client.send(one_call())).outcome is Outcome.SHED


@pytest.mark.parametrize("wait_s", [3600.0, float("inf"), float("nan"), -5.0])
async def test_an_absurd_retry_after_is_not_waited_for(pair: StartPair, wait_s: float) -> None:
    mock = await pair(obey=True, fault=Fault.SHED)
    mock.server.retry_after = f"Retry-After: {wait_s}\r\nretry-after-ms: {1e3 * wait_s}\r\n"
    started_s = time.perf_counter()
    record = await mock.client.send(one_call())
    assert (record.outcome, record.retries) == (Outcome.SHED, 0)
    assert time.perf_counter() - started_s < 5


async def test_retries_have_a_bound(pair: StartPair) -> None:
    mock = await pair(obey=True, fault=Fault.SHED)
    mock.server.retry_after = "Retry-After: 0\r\n"
    record = await mock.client.send(one_call())
    assert (record.outcome, record.retries) == (Outcome.SHED, load_client.RETRIES_MAX)


@pytest.mark.parametrize(
    ("fault", "outcome", "problem"),
    [
        (Fault.HANG_AT_ONCE, Outcome.TIMEOUT, ""),
        (Fault.HANG_MIDWAY, Outcome.TIMEOUT, ""),
        (Fault.ONLY_COMMENTS, Outcome.TIMEOUT, ""),
        (Fault.BAD_HTTP, Outcome.ERROR, "bad HTTP"),
        (Fault.NO_STREAM, Outcome.WRONG, "not an event stream"),
        (Fault.ENDLESS, Outcome.WRONG, "more than 72 tokens, asked for 8"),
    ],
)
async def test_no_server_holds_the_client(pair: StartPair, fault: Fault, outcome: Outcome, problem: str) -> None:
    mock = await pair(fault=fault, pace=Pace(token_ms=2), timeout_s=1.0)
    started_s = time.perf_counter()
    record = await mock.client.send(one_call())
    assert record.outcome is outcome
    assert any(problem in text for text in record.problems) or not problem
    assert time.perf_counter() - started_s < 5
    assert summarize([record]).completed == 0
    mock.server.fault = Fault.NONE
    assert (await mock.client.send(one_call())).outcome is Outcome.COMPLETED, "and the client goes on"


async def test_nobody_listens(pair: StartPair) -> None:
    mock = await pair()
    await mock.server.close()
    record = await mock.client.send(one_call())
    assert record.outcome is Outcome.ERROR
    assert record.end_s is not None
    assert list(summarize([record]).problems) == ["cannot connect: connection refused"]


async def test_cancel_on_schedule_hangs_up(pair: StartPair) -> None:
    mock = await pair(pace=Pace(token_ms=20))
    call = Call("/v1/completions", one_call(200).body, cancel_after_s=0.2)
    record = await mock.client.send(call)
    assert record.outcome is Outcome.CANCELLED
    assert 0 < record.tokens_seen < 100
    for _ in range(100):
        if mock.server.disconnected:
            break
        await asyncio.sleep(0.02)
    assert mock.server.disconnected == 1


async def test_an_idle_connection_closed_by_the_server_is_no_fault(pair: StartPair) -> None:
    mock = await pair()
    assert (await mock.client.send(one_call())).outcome is Outcome.COMPLETED
    await mock.server.close()
    assert await mock.server.start(mock.port) == mock.port
    record = await mock.client.send(one_call())
    assert (record.outcome, record.problems) == (Outcome.COMPLETED, [])
    assert summarize([record]).resends == record.resends <= 1  # none when the client saw the end before it sent


async def test_a_drop_before_the_first_byte_is_an_error(pair: StartPair) -> None:
    """The server had the request: sent again, it would be done twice, and the drop would be nowhere."""
    mock = await pair()
    assert (await mock.client.send(one_call())).outcome is Outcome.COMPLETED
    mock.server.fault = Fault.HANG_AT_ONCE
    sending = asyncio.create_task(mock.client.send(one_call()))
    await asyncio.sleep(3 * load_client.CLOSED_BEFORE_S)
    mock.server.fault = Fault.NONE
    await mock.server.close()
    assert await mock.server.start(mock.port) == mock.port
    record = await sending
    assert (record.outcome, record.resends, summarize([record]).errors) == (Outcome.ERROR, 0, 1)
    assert (await mock.client.send(one_call())).outcome is Outcome.COMPLETED


async def test_nonsense_on_a_connection_used_before_is_an_error(pair: StartPair) -> None:
    mock = await pair()
    assert (await mock.client.send(one_call())).outcome is Outcome.COMPLETED
    served = mock.server.served
    mock.server.fault = Fault.BAD_HTTP
    record = await mock.client.send(one_call())
    assert (record.outcome, record.resends, mock.server.served) == (Outcome.ERROR, 0, served + 1)


async def test_a_connection_that_dies_at_once_is_replaced_and_counted(pair: StartPair) -> None:
    mock = await pair()
    assert (await mock.client.send(one_call())).outcome is Outcome.COMPLETED
    mock.server.drops_left = 1
    record = await mock.client.send(one_call())
    assert (record.outcome, record.resends) == (Outcome.COMPLETED, 1)
    mock.server.drops_left = 2
    assert (await mock.client.send(one_call())).outcome is Outcome.ERROR, "once, and no more"


async def test_new_connection_for_every_request(pair: StartPair) -> None:
    mock = await pair(reuse=False)
    records = await closed_loop(mock.client, [one_call() for _ in range(6)], streams=2)
    assert [record.outcome for record in records] == [Outcome.COMPLETED] * 6


async def stalled_load(pair: StartPair) -> tuple[float, float]:
    """(p90 latency, longest lateness of sending) of 100 requests/s for 2 s, with the server stopped from 0.5 s to 1.5 s."""
    mock = await pair()
    calls = [one_call(2) for _ in range(200)]
    load = asyncio.create_task(open_loop(mock.client, calls, evenly(100.0, 200), in_flight_max=4))
    await asyncio.sleep(0.5)
    mock.server.stall(1.0)
    records = await load
    assert all(record.outcome is Outcome.COMPLETED for record in records)
    p90 = quantile([record.e2e_s or 0.0 for record in records], 0.9)
    assert p90 is not None
    return p90, max(record.send_lag_s or 0.0 for record in records)


async def test_a_stalled_server_shows_in_the_latencies(pair: StartPair) -> None:
    """Only four requests may be in flight: without scheduled starts just those four would look slow."""
    p90_s, lag_s = await stalled_load(pair)
    assert p90_s > 0.5
    assert lag_s > 0.5


async def test_control_latency_from_sending_would_hide_the_stall(pair: StartPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same load measured from the moment of sending: the stall is gone from the p90. So the test above has teeth."""
    send = load_client.LoadClient.send

    async def from_sending(self: load_client.LoadClient, call: Call, scheduled_s: float | None = None) -> object:
        return await send(self, call, time.perf_counter())

    monkeypatch.setattr(load_client.LoadClient, "send", from_sending)
    p90_s, _ = await stalled_load(pair)
    assert p90_s < 0.5
