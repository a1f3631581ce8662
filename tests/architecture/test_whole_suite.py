"""`make test` runs every test once, fails when a part fails, and an interrupt reaches all that it started."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests import whole_suite
from tests.markers import ALONE, BESIDE_OTHERS, OF_RAY_ONLY, PATIENT, WITHOUT_RAY

ROOT = Path(__file__).resolve().parents[2]
PARTS = (WITHOUT_RAY, BESIDE_OTHERS, ALONE, PATIENT)
SLEEPERS = """
import subprocess, sys
from tests import whole_suite

def start(marks, *arguments, output=None):
    code = "import sys, time, pathlib; pathlib.Path(sys.argv[1]).touch(); time.sleep(300)"
    return subprocess.Popen([sys.executable, "-Sc", code, arguments[-1] + "/" + marks.replace(" ", "-")], start_new_session=True)

whole_suite.start = start
sys.exit(whole_suite.main(sys.argv[1:]))
"""
SESSION = """
try:
    print(open("/proc/self/autogroup").read().strip())
except OSError:
    print()  # of a kernel that has no groups of sessions
"""


@pytest.mark.parametrize(
    "marks",
    [
        (),
        ("slow",),
        ("patient",),
        ("patient", "slow"),
        ("cluster",),
        ("cluster", "slow"),
        ("cluster", "alone"),
        ("cluster", "alone", "slow"),
    ],
)
def test_every_test_is_of_one_part(marks: Sequence[str]) -> None:
    chosen = [part for part in PARTS if Expression.compile(part).evaluate(lambda name, **_: name in marks)]
    assert len(chosen) == 1
    assert (chosen[0] in OF_RAY_ONLY) == ("cluster" in marks)


@pytest.mark.parametrize(
    ("of_parts", "status", "ran"),
    [
        ((0, 0, 0, 0), 0, PARTS),
        ((5, 0, 5, 5), 0, PARTS),
        ((1, 0, 0, 0), 1, PARTS[:2]),
        ((0, 1, 0, 0), 1, PARTS[:2]),
        ((5, 3, 0, 0), 3, PARTS[:2]),
        ((0, 5, 2, 0), 2, PARTS),
        ((0, 5, 0, 4), 4, PARTS),
    ],
)
def test_a_part_that_fails_is_the_end(monkeypatch: pytest.MonkeyPatch, of_parts: Sequence[int], status: int, ran: Sequence[str]) -> None:
    started = []

    def start(marks: str, *arguments: str, output: object = None) -> subprocess.Popen[bytes]:
        started.append(marks)
        assert arguments[-1] == "given" and (output is not None) == (marks in (BESIDE_OTHERS, PATIENT))
        return subprocess.Popen([sys.executable, "-Sc", f"raise SystemExit({dict(zip(PARTS, of_parts, strict=True))[marks]})"])

    monkeypatch.setattr(whole_suite, "start", start)
    monkeypatch.setattr(whole_suite.signal, "signal", lambda *_: None)
    assert whole_suite.main(["given"]) == status
    assert sorted(started) == sorted(ran)


def test_only_where_two_processes_compute_each_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [whole_suite.environment(part).get("OMP_NUM_THREADS") for part in PARTS] == ["1", None, None, "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [whole_suite.environment(part)["OMP_NUM_THREADS"] for part in PARTS] == ["3"] * 4, "who says how many means it"


def test_what_is_compiled_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert not any("PYTHONDONTWRITEBYTECODE" in whole_suite.environment(part) for part in PARTS)


def test_no_search_for_garbage_looks_at_what_was_imported() -> None:
    assert gc.get_freeze_count() > 10_000


@pytest.mark.parametrize("part", PARTS)
def test_only_who_is_patient_gets_a_core_while_nobody_else_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str) -> None:
    interpreter, said = tmp_path / "python", tmp_path / "said"
    interpreter.write_text(f"#!{sys.executable} -S\nimport os\nprint(os.sched_getscheduler(0), os.getsid(0) == os.getpid())\n{SESSION}")
    interpreter.chmod(0o700)
    monkeypatch.setattr(whole_suite.sys, "executable", str(interpreter))
    with said.open("wb") as output:
        assert whole_suite.start(part, output=output).wait(60) == 0, said.read_text()
    mine, patient = os.sched_getscheduler(0), part == PATIENT
    policy, of_session = said.read_text().splitlines()
    assert policy == f"{os.SCHED_IDLE if patient else mine} True"
    assert of_session == "" or of_session.endswith(" nice 19") == patient


PATIENCE = """
import os, subprocess, sys, threading, time
if len(sys.argv) > 1:
    children = [subprocess.Popen([sys.executable, "-S", __file__]) for _ in range(2)]
    sys.exit(max(child.wait() for child in children))
def look():
    while os.sched_getscheduler(0) == os.SCHED_IDLE:
        time.sleep(0.02)
threads = [threading.Thread(target=look) for _ in range(2)]
for thread in threads: thread.start()
print("yields" if os.sched_getscheduler(0) == os.SCHED_IDLE else "takes", flush=True)
for thread in threads: thread.join()
look()
"""
COMES_BACK = "import os; o = os.sched_param(0); os.sched_setscheduler(0, os.SCHED_IDLE, o); os.sched_setscheduler(0, os.SCHED_OTHER, o)"


def test_who_was_patient_gets_cores_when_the_others_have_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every thread of every process of it: on a machine that others keep busy it would never end."""
    if subprocess.run([sys.executable, "-Sc", COMES_BACK], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("nobody leaves SCHED_IDLE here: without CAP_SYS_NICE, or `ulimit -e 20`, the kernel forbids it")
    interpreter, said = tmp_path / "python", tmp_path / "said"
    interpreter.write_text(f"#!{sys.executable} -S\n{PATIENCE}")
    interpreter.chmod(0o700)
    first = subprocess.Popen(["true"])
    with said.open("wb") as output, monkeypatch.context() as patched:
        patched.setattr(whole_suite.sys, "executable", str(interpreter))
        patient = whole_suite.start(PATIENT, output=output)
    try:
        deadline_s = time.monotonic() + 60
        while said.read_text() != "yields\n" * 2:
            assert patient.poll() is None and time.monotonic() < deadline_s, said.read_text()
            time.sleep(0.02)
        time.sleep(0.2)
        assert patient.poll() is None, "the control: by itself it does not come back"
        whole_suite.want_the_cores(patient)
        assert patient.wait(60) == 0
        assert whole_suite.statuses(first, patient) == [0, 0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(patient.pid, signal.SIGKILL)
        patient.wait()


def test_who_ran_beside_the_first_gets_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    events = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self) -> int:
            events.append(self.name)
            return 0

    monkeypatch.setattr(whole_suite, "want_the_cores", lambda part: events.append(f"{part.name} wants"))
    first, beside = Part("first"), Part("beside")
    assert whole_suite.statuses(first, beside) == [0, 0]  # type: ignore[arg-type]
    assert events[:2] == ["first", "beside wants"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_reaches_every_part(tmp_path: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen([sys.executable, "-c", SLEEPERS, str(tmp_path)], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2:
            assert running.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.02)
        running.send_signal(number)
        assert running.wait(60) not in (0, -number), "it has waited for its parts, and says that they did not succeed"
        assert len(list(tmp_path.iterdir())) == 2, "the last part was not begun"
        assert sleeping(tmp_path) == []
    finally:
        for pid in (*sleeping(tmp_path), running.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        running.wait()


def sleeping(folder: Path) -> list[int]:
    """Processes of SLEEPERS that live."""
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if f"{folder}/" in read(path)]


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
