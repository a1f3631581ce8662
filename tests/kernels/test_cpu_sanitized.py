"""The step under the address sanitizer: legal steps touch nothing beside their memory, illegal ones nothing at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.build import CannotBuild, cpu_flags, granted, library_path, usable_isas

ROOT = Path(__file__).resolve().parents[2]
SANITIZED = ("-fsanitize=address", "-Og")  # every access is checked, as with -O1, but not again wherever it was inlined


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Skips where the compiler or the CPU lacks what is needed; sources that do not compile are a failure."""
    folder = tmp_path_factory.mktemp("sanitized")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ on PATH: nothing can be compiled with the address sanitizer")
    (folder / "empty.cpp").write_text("int main() { return 0; }\n")
    probe = [compiler, *SANITIZED, str(folder / "empty.cpp"), "-o", str(folder / "empty")]
    if subprocess.run(probe, capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("g++ links no empty program with the address sanitizer: most often libasan is not installed")
    try:
        isa = usable_isas(granted(cpu_flags()))[0]
    except CannotBuild as error:
        pytest.skip(f"the C++ step has no form for this CPU: {error}")
    return library_path(isa, folder, extra=SANITIZED)


@pytest.fixture(scope="module")
def done(library: Path) -> subprocess.CompletedProcess[str]:
    """A process that takes the legal steps first, and then an illegal one that nothing checks."""
    compiler = shutil.which("g++")
    assert compiler is not None
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(ROOT),
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.kernels.sanitized", str(library)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.slow
def test_nothing_out_of_bounds(done: subprocess.CompletedProcess[str]) -> None:
    assert done.stdout == "checked\n", done.stderr[-2000:]


@pytest.mark.slow
def test_the_sanitizer_would_see_it(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode != 0 and ("AddressSanitizer" in done.stderr or done.returncode < 0), done.stderr[-2000:]
