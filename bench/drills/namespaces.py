"""Drill: a replica's two ranks on two nodes that share nothing but a cable: network namespaces with addresses of their own.

Each namespace runs a raylet; `rantang doctor` places a rank on each (SPREAD) and adds up over the cable. Then the cable is cut, which must
be said in one line. Needs root and iproute2. `python -m bench.drills.namespaces`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import result
from bench.result import ROOT, Result

ADDRESSES = ("10.77.31.1", "10.77.31.2")
PORT = 6479
START_TIMEOUT_S = 240.0
DOCTOR_TIMEOUT_S = 400.0
_RANK = re.compile(r"rank (\d): ok, ([\d.]+) \(node (\w+)\).* on (\S+), torch")
_RATE = re.compile(r"all-reduce of ([\d,]+) KiB .* ([\d.]+) ms, ([\d.]+) GB/s")


@dataclass(frozen=True, slots=True)
class Said:
    """What the doctor printed, and how it ended."""

    status: int
    lines: tuple[str, ...]
    took_s: float

    @property
    def ranks(self) -> list[tuple[str, ...]]:
        """(rank, address, node, interface) of those that are well."""
        return [found.groups() for line in self.lines if (found := _RANK.match(line))]

    @property
    def rates(self) -> list[tuple[str, ...]]:
        return [found.groups() for line in self.lines if (found := _RATE.match(line))]


class Namespaces:
    """Two of them with a cable between; taken away whole."""

    def __init__(self) -> None:
        mark = secrets.token_hex(2)
        self.names = (f"rt{mark}a", f"rt{mark}b")
        self.cables = (f"ve{mark}a", f"ve{mark}b")

    def __enter__(self) -> Namespaces:
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", self.cables[0], "type", "veth", "peer", "name", self.cables[1])
        for name, cable, address in zip(self.names, self.cables, ADDRESSES, strict=True):
            _ip("link", "set", cable, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            _ip("-n", name, "link", "set", cable, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.SubprocessError):
                _ip("netns", "del", name)

    def inside(self, which: int) -> list[str]:
        """The words before a command that is to run in one of them."""
        return ["ip", "netns", "exec", self.names[which]]

    def cut(self) -> None:
        _ip("-n", self.names[1], "link", "set", self.cables[1], "down")


@contextlib.contextmanager
def raylets(spaces: Namespaces, environment: dict[str, str], scratch: Path) -> Iterator[None]:
    """A Ray with a node in each namespace; both end with the block."""
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus", "1", "--object-store-memory", "80000000"]
    head = [*spaces.inside(0), *ray, "--head", "--node-ip-address", ADDRESSES[0], "--port", str(PORT), "--include-dashboard", "false"]
    head += ["--temp-dir", str(scratch / "ray"), "--disable-usage-stats"]
    other = [*spaces.inside(1), *ray, "--address", f"{ADDRESSES[0]}:{PORT}", "--node-ip-address", ADDRESSES[1]]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate((head, other)):
            path = scratch / f"ray-{number}.log"
            with path.open("wb") as log:
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT, start_new_session=True))
            _wait_started(started[-1], path)
        yield
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)  # it would drain for 30 s what nobody needs
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def doctor(spaces: Namespaces, environment: dict[str, str], **more: str) -> Said:
    command = [*spaces.inside(0), sys.executable, "-m", "cluster.cli", "doctor", "--ray-address", f"{ADDRESSES[0]}:{PORT}"]
    command += ["--tensor-parallel-size", "2", "--replicas", "1", "--replica-cpus", "1", "--placement-strategy", "SPREAD"]
    began_s = time.monotonic()
    done = subprocess.run(command, env=environment | more, capture_output=True, text=True, timeout=DOCTOR_TIMEOUT_S, cwd=ROOT, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    return Said(
        done.returncode, tuple(line for line in lines if line.startswith(("rank", "all-reduce", "rantang: "))), time.monotonic() - began_s
    )


def run() -> Result:
    with tempfile.TemporaryDirectory(prefix="rt", dir="/tmp") as name, Namespaces() as spaces:
        scratch = Path(name)
        token = scratch / "token"
        token.write_text(secrets.token_hex(32))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "TMPDIR": str(scratch)}
        with raylets(spaces, environment, scratch):
            well = doctor(spaces, environment)
            spaces.cut()
            cut = doctor(spaces, environment)
    ranks = well.ranks
    rates = {f"{size.replace(',', '')}_kib_gb_per_s": float(rate) for size, _, rate in well.rates}
    metrics = (
        result.at_least("ranks_well", float(len(ranks)), 2, "ranks"),
        result.at_least("addresses", float(len({address for _, address, _, _ in ranks} & set(ADDRESSES))), 2, "addresses"),
        result.at_least("nodes", float(len({node for _, _, node, _ in ranks})), 2, "nodes"),
        result.at_least("cables_used", float(len({cable for *_, cable in ranks} & set(spaces.cables))), 2, "interfaces"),
        result.at_least("refused_when_cut", float(cut.status != 0 and len(cut.lines) > 0), 1, ""),
        *(result.plain(name, rate, "GB/s") for name, rate in sorted(rates.items())),
    )
    return Result(
        "namespaces", {"addresses": " ".join(ADDRESSES)}, metrics=metrics, details={"well": list(well.lines), "cut": list(cut.lines)}
    )


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _wait_started(process: subprocess.Popen[bytes], log: Path) -> None:
    """Until `ray start --block` says that it blocks. Raises RuntimeError with what it said instead."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while "--block" not in (said := log.read_text()):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"a raylet did not start: {said[-2000:]}")
        time.sleep(0.3)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    drill = run()
    result.show(drill)
    return 0 if drill.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
