"""No result takes another one's name, however many end in one second, and half a result is none."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import result
from bench.cli import app
from bench.connection import Target
from bench.mock_openai import Pace
from bench.result import Result, command_line, load_requests, load_result, write
from tests.bench.made_up_results import card, point, rows_for
from tests.bench.served_mock import served_mock


class OneSecond(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> OneSecond:
        return cls(2026, 1, 2, 3, 4, 5, tzinfo=tz)


def test_results_of_one_second_are_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datetime, "datetime", OneSecond)
    paths = [write(Result("run-chat", {"salt": str(i)}, points=(point([card()]),)), tmp_path, rows_for(0, i + 1)) for i in range(3)]
    assert [path.name for path in paths] == [f"run-chat-20260102-030405{end}.json" for end in ("", "-2", "-3")]
    for i, path in enumerate(paths):
        assert load_result(path).configuration == {"salt": str(i)} and len(load_requests(path)) == i + 1


def test_half_a_result_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> dict[str, str | int | float]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(result, "machine", full)
    with pytest.raises(OSError, match="No space left"):
        write(Result("run-chat", {}), tmp_path, rows_for(0))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "url", ["http://me:secret@127.0.0.1:1/v1", "https://secret@host.example", "http://127.0.0.1:1?key=secret", "http://h#secret"]
)
def test_what_would_not_be_sent_is_no_part_of_a_url(url: str) -> None:
    with pytest.raises(ValueError, match="would not be sent") as raised:
        Target.parse(url)
    assert "secret" not in str(raised.value)
    assert Target.parse("http://127.0.0.1:1/v1/").port == 1, "the control"


def test_no_password_is_published() -> None:
    line = command_line(["/x/rantang", "--url", "http://me:secret@127.0.0.1:1/v1", "--url=https://me:s@host.example:8/v1"])
    assert line == "rantang --url http://127.0.0.1:1/v1 --url=https://HOST:8/v1"


@pytest.mark.parametrize("command", ["run", "sweep", "choose"])
def test_who_interrupts_the_drawing_knows_where_the_result_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"bench.{command}_command.report_too", interrupted)
    rest = ("--rate", "300", "--report") if command == "run" else ("--rates", "300")
    with served_mock(Pace(token_ms=1)) as url:
        asked = [command, "--url", url, "-w", "chat", "--requests", "6", "--out", str(tmp_path), *rest]
        done = CliRunner().invoke(app, asked, env={"COLUMNS": "300"})
    (path,) = tmp_path.glob("*.json")
    assert done.exit_code == 130 and f"written to {path}" in done.output and load_result(path).points
