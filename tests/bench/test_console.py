"""What others call themselves is printed as it is, and moves no cursor."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from bench import result, run_command, scorecard_table
from bench.console import PlainConsole
from bench.result import Metric, Result
from tests.bench.made_up_results import card, point
from tests.bench.mock_pair import StartMock

NAME = "[x] [red]y[/red] :smile: \x1b[31mz\r\x07"
SHOWN = "[x] [red]y[/red] :smile: \ufffd[31mz\ufffd\ufffd"


def printed(console: Console) -> str:
    table = Table(title=NAME)
    table.add_column(NAME)
    table.add_row(NAME)
    console.print(table)
    console.print(NAME, style="red")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_names_are_shown_as_they_are_everywhere() -> None:
    assert printed(PlainConsole(file=io.StringIO(), width=100)).count(SHOWN) == 4
    assert SHOWN not in printed(Console(file=io.StringIO(), width=100)), "the control: another console reads signs in them"


def test_a_trace_with_brackets_in_its_name_is_named_whole(mock_url: StartMock, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "mine[x].jsonl"
    trace.write_text('{"timestamp":0,"input_length":8,"output_length":2}\n')
    options = run_command.RunOptions([str(trace)], server=run_command.ServerOptions(mock_url()), folder=tmp_path)
    assert run_command.run(run_command.plan(options)) == 0
    assert capsys.readouterr().out.count("mine[x]") >= 4


def test_metrics_with_brackets_and_a_mark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result.show(Result("drill [x]", {}, metrics=(Metric("lost[y]", 1.0, "", "<= 0", False),)), tmp_path)
    said = capsys.readouterr().out
    assert "drill [x]" in said and "lost[y]" in said and "BROKEN" in said


def test_a_pipe_in_a_name_opens_no_column() -> None:
    lines = scorecard_table.markdown([point([card()], label="a|b")]).splitlines()
    table = [line.replace("\\|", "") for line in lines if line.startswith("|")]
    assert len(table) > 5 and {line.count("|") for line in table} == {3}
