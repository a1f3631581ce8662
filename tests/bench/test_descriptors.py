"""A process that may open few files measures what it can, says so, and never lets its own limit count as a server's errors."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from bench.descriptors import KEPT, check_streams, within
from bench.load import Load
from bench.mock_openai import Pace
from tests.bench.mock_pair import StartMock

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("limit", "wanted", "left"),
    [(resource.RLIM_INFINITY, 50_000, 50_000), (20_000, 50_000, 20_000 - KEPT), (20_000, 300, 300), (64, 300, 32), (1, 300, 1)],
)
def test_what_a_limit_leaves(limit: int, wanted: int, left: int) -> None:
    assert within(limit, wanted) == left


def test_a_closed_loop_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 1_128))
    with pytest.raises(ValueError, match=r"5,000 streams are as many connections, and this process may have 1,000 \(ulimit -Hn\)"):
        check_streams(Load(streams=5_000), 9_000)
    for load, requests in ((Load(streams=1_000), 9_000), (Load(streams=5_000), 1_000), (Load(rate_per_s=9e3), 9_000)):
        check_streams(load, requests)  # the control: so many have connections, or wait for one


def run(files: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`rantang bench run` in a process that may open so many files and no more."""
    limited = f"import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files})); "
    command = [sys.executable, "-c", f"{limited}runpy.run_module('bench.cli', run_name='__main__', alter_sys=True)", "run", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_few_files_are_said_and_bring_no_errors(mock_url: StartMock, tmp_path: Path) -> None:
    asked = ("-w", "chat", "--requests", "120", "--url", mock_url(Pace(token_ms=1)), "--out", str(tmp_path))
    refused = run(64, *asked, "--streams", "120")
    assert refused.returncode == 2 and "120 streams are as many connections" in refused.stderr
    done = run(64, *asked, "--rate", "2000")
    assert done.returncode == 0 and "at most 32 of 120 requests can be in flight" in done.stdout
    assert "120 of 120 accepted" in done.stdout, "none of them for want of a file"
    assert done.stdout.index("the client sent up to") < done.stdout.index("TTFT p50"), "and whose latencies these are is said first"
    assert "in flight" not in run(1_024, *asked, "--rate", "2000").stdout, "the control"
