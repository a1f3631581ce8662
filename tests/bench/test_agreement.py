"""The comparison of two clients: what is compared, the bound, and a difference that breaks it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import agreement
from bench.agreement import Load, Seen, metrics_of, ours, read_theirs, theirs_command
from bench.mock_openai import Pace
from bench.peers.home import Home, PeerError
from bench.works import Work
from tests.bench.mock_pair import StartPair

WORK = Work("agreement", streams=2, prompt_tokens=8, output_tokens=5, requests=4)
SEEN = Seen(100.0, 20.0, 400.0, 4)


def broken(own: Seen, other: Seen) -> set[str]:
    return {metric.name for metric in metrics_of([own] * 3, [other] * 3, WORK) if metric.holds is False}


def test_within_three_percent_holds_and_beyond_does_not() -> None:
    assert broken(SEEN, SEEN) == set()
    assert broken(replace(SEEN, itl_ms=20.5), SEEN) == set()
    assert broken(replace(SEEN, itl_ms=21.0), SEEN) == {"difference.itl_ms"}
    assert broken(replace(SEEN, ttft_ms=96.0, output_tokens_per_s=380.0), SEEN) == {"difference.ttft_ms", "difference.output_tokens_per_s"}
    assert broken(replace(SEEN, completed=3), SEEN) == {"lost"}


def test_one_slow_run_of_three_is_no_difference() -> None:
    own = [SEEN, replace(SEEN, ttft_ms=500.0), SEEN]
    assert all(metric.holds is not False for metric in metrics_of(own, [SEEN] * 3, WORK))


@pytest.mark.parametrize("rate_per_s", [None, 50.0], ids=["closed", "open"])
async def test_our_side_sees_the_pace_of_the_mock(pair: StartPair, rate_per_s: float | None) -> None:
    served = await pair(pace=Pace(first_ms=30.0, token_ms=10.0))
    seen = await ours(f"http://127.0.0.1:{served.port}", Load(WORK, rate_per_s))
    assert seen.completed == 4 and seen.ttft_ms >= 29.0 and seen.output_tokens_per_s > 0


def test_their_report_is_read() -> None:
    report = {"median_ttft_ms": 100.0, "median_itl_ms": 20.0, "output_throughput": 400.0, "completed": 4, "mean_ttft_ms": 1.0}
    assert read_theirs(report) == SEEN
    with pytest.raises(KeyError):
        read_theirs({})


def test_both_get_the_same_load(tmp_path: Path) -> None:
    closed, even = (theirs_command(Home(tmp_path), "http://127.0.0.1:1", Load(WORK, rate), tmp_path / "x") for rate in (None, 8.0))
    assert closed[closed.index("--max-concurrency") + 1] == "2" and "--request-rate" not in closed
    assert even[even.index("--request-rate") + 1] == "8" and "--max-concurrency" not in even
    for command in (closed, even):
        assert command[command.index("--num-prompts") + 1] == "4" and command[command.index("--random-output-len") + 1] == "5"


FAKE_VLLM = """#!{python}
import json, os, sys
given = dict(zip(sys.argv[3::2], sys.argv[4::2]))
if given["--base-url"].endswith("0:9"):
    sys.exit("cannot connect")
report = {{"median_ttft_ms": 100.0, "median_itl_ms": 20.0, "output_throughput": 400.0, "completed": int(given["--num-prompts"])}}
json.dump(report, open(os.path.join(given["--result-dir"], given["--result-filename"]), "w"))
"""


def test_their_client_is_run_and_its_failure_told(tmp_path: Path) -> None:
    home = Home(tmp_path)
    program = home.executable("vllm", "vllm")
    program.parent.mkdir(parents=True)
    program.write_text(FAKE_VLLM.format(python=sys.executable))
    program.chmod(0o755)
    assert agreement.theirs(home, "http://127.0.0.1:80", Load(WORK)) == SEEN
    with pytest.raises(PeerError, match="exit code 1\ncannot connect"):
        agreement.theirs(home, "http://127.0.0.0:9", Load(WORK))
    mock = [sys.executable, "-m", "bench.mock_openai", "--first-ms", "20", "--token-ms", "5"]
    outcome = agreement.compare(home, Load(WORK), 1, mock)
    assert outcome.holds is False  # the fake's figures are not the mock's
    assert str(tmp_path) not in json.dumps(outcome.configuration)
