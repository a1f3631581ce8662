"""Two sweeps never share what is finished."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.server import ServerOptions
from bench.slo import Slo
from bench.sweep.carry_out import begin, carry_out
from bench.sweep.claim import claim
from bench.sweep.plan import SweepOptions, SweepPlan, plan_sweep
from bench.sweep.state import ResumeError

ROOT = Path(__file__).resolve().parents[3]
HOLD = """
import sys
from pathlib import Path
from bench.sweep.claim import claim
held = claim(Path(sys.argv[1]))
print(held is not None, flush=True)
input()
"""


@contextmanager
def another(folder: Path) -> Iterator[bool]:
    """Another process that claims the folder, until the end of the block; whether it got it."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as one:
        assert one.stdout is not None
        yield one.stdout.readline() == "True\n"
        one.communicate("\n")


def plan(folder: Path) -> SweepPlan:
    return plan_sweep(SweepOptions("chat", Slo(ttft_ms=1_000), ServerOptions("http://127.0.0.1:1"), "2", 8, folder=folder))


def test_a_folder_is_one_process_s_own(tmp_path: Path) -> None:
    asked = plan(tmp_path)
    with another(asked.state_folder) as got:
        assert got
        for restart in (False, True):
            with pytest.raises(ResumeError, match=r"another sweep is running in .*sweep-chat-baseline\.partial"):
                begin(asked, restart=restart)
        assert claim(tmp_path / "other") is not None, "the control: another folder is free"
    state = begin(asked, restart=False)
    assert state.points == [], "and this one too, once it is over"
    with another(asked.state_folder) as got:
        assert not got
    assert state.held is not None
    state.held.close()
    with another(asked.state_folder) as got:
        assert got


def test_a_sweep_that_finishes_nothing_leaves_nothing(tmp_path: Path) -> None:
    asked = plan(tmp_path)
    state = begin(asked, restart=False)
    assert asked.state_folder.is_dir()
    with pytest.raises(Exception, match="nothing answers"):
        carry_out(asked, state, lambda line: None)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_its_owner_removed_is_claimed_anew(tmp_path: Path) -> None:
    first = claim(tmp_path / "s")
    assert first is not None
    (tmp_path / "s" / "lock").unlink()
    second = claim(tmp_path / "s")
    assert second is not None and (tmp_path / "s" / "lock").exists()
