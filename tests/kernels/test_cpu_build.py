"""The library's way into the cache, and every reason for which there is none."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernels.cpu import build
from kernels.cpu.build import ISAS, CannotBuild, best_library, cache_directory, cpu_flags, granted, library_path, usable_isas
from kernels.cpu.lock import lock_file

AMX, AVX512, AVX2 = ISAS
A_COMPILER = '#!/bin/sh\necho "$@" >> "$(dirname "$0")/calls"\nfor last; do :; done\necho library > "$last"\n'


def compiler_of(directory: Path, script: str) -> str:
    program = directory / "compiler"
    program.write_text(script)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def test_the_sets_that_the_cpu_has_the_best_first() -> None:
    assert usable_isas(AMX.needs) == ISAS
    assert usable_isas(AVX512.needs) == (AVX512, AVX2)
    assert usable_isas(AVX512.needs - {"avx512_bf16"}) == (AVX2,)
    assert usable_isas(AMX.needs, "avx2") == (AVX2,)
    with pytest.raises(CannotBuild, match="neither AVX-512 BF16 nor AVX2"):
        usable_isas(AVX2.needs - {"fma"})
    with pytest.raises(CannotBuild, match="no avx512"):
        usable_isas(AVX2.needs, "avx512")
    with pytest.raises(CannotBuild, match="RANTANG_CPU_ISA is 'avx1024', which is none of amx, avx512, avx2"):
        usable_isas(AMX.needs, "avx1024")


def test_a_compiler_that_does_not_know_the_best_set_builds_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = 'case "$*" in *-mamx*) echo "error: unrecognized option -mamx-tile" >&2; exit 1;; esac'
    program = compiler_of(tmp_path, A_COMPILER.replace("\n", f"\n{refuses}\n", 1))
    monkeypatch.setattr(build.shutil, "which", lambda name: program)
    monkeypatch.setattr(build, "cpu_flags", lambda: AMX.needs)
    monkeypatch.setattr(build, "granted", lambda flags: flags)
    isa, _, missed = best_library(tmp_path / "cache")
    assert isa is AVX512 and "unrecognized option -mamx-tile" in missed
    with pytest.raises(CannotBuild, match="-mamx-tile"):
        best_library(tmp_path / "cache", "amx")
    monkeypatch.setattr(build, "cpu_flags", lambda: AVX2.needs - {"fma"})
    with pytest.raises(CannotBuild, match="neither"):
        best_library(tmp_path / "cache")


def test_no_amx_where_the_kernel_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert granted(AVX512.needs) == AVX512.needs, "nothing is asked"
    for answer, expected in ((0, AMX.needs), (-1, AMX.needs - {"amx_tile", "amx_bf16"})):
        monkeypatch.setattr(build.ctypes, "CDLL", lambda _, answer=answer: SimpleNamespace(syscall=lambda *_: answer))
        assert granted(AMX.needs) == expected


def test_a_refusal_of_amx_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiler_of(tmp_path, A_COMPILER)
    monkeypatch.setattr(build.shutil, "which", lambda name: program)
    monkeypatch.setattr(build, "cpu_flags", lambda: AMX.needs)
    monkeypatch.setattr(build, "granted", lambda flags: flags - {"amx_tile", "amx_bf16"})
    isa, _, missed = best_library(tmp_path / "cache")
    assert isa is AVX512 and missed == "Linux refuses AMX to this process"
    assert best_library(tmp_path / "cache", "avx512")[2] == "", "who asks for less misses nothing"
    with pytest.raises(CannotBuild, match="Linux refuses AMX"):
        best_library(tmp_path / "cache", "amx")
    monkeypatch.setattr(build, "granted", lambda flags: flags)
    isa, _, missed = best_library(tmp_path / "cache")
    assert isa is AMX and missed == ""


def test_flags_as_the_kernel_writes_them(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\nbugs\t\t: none\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx2", "fma"}
    assert cpu_flags(tmp_path / "none") == frozenset()


def test_compiled_once_for_the_same_sources_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, cache = compiler_of(tmp_path, A_COMPILER), tmp_path / "cache" / "kernels"
    first = library_path(AVX2, cache, compiler=compiler)
    assert first.read_text() == "library\n" and library_path(AVX2, cache, compiler=compiler) == first
    assert library_path(AVX512, cache, compiler=compiler) != first
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2 and "-mavx512bf16" not in calls[0] and "-mavx512bf16" in calls[1]
    assert sorted(path.suffix for path in cache.iterdir() if path.name != ".lock") == [".so", ".so"], "nothing half done stays"
    sources = tmp_path / "kernels.cpu"
    sources.mkdir()
    for name in build.SOURCES:
        (sources / name).write_text("changed")
    monkeypatch.setattr(build, "__file__", str(sources / "build.py"))
    assert library_path(AVX2, cache, compiler=compiler) != first, "other sources, another library"


def test_a_library_in_the_cache_needs_no_compiler(tmp_path: Path) -> None:
    made = library_path(AVX2, tmp_path, compiler=compiler_of(tmp_path, A_COMPILER))
    assert library_path(AVX2, tmp_path, compiler="no-such-compiler") == made


def test_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotBuild, match="no no-such-compiler on PATH"):
        library_path(AVX2, tmp_path, compiler="no-such-compiler")
    failing = compiler_of(tmp_path, "#!/bin/sh\necho 'step.cpp:1: error: broken' >&2\nexit 1\n")
    with pytest.raises(CannotBuild, match=r"failed: step.cpp:1: error: broken"):
        library_path(AVX2, tmp_path / "cache", compiler=failing)
    said = "/usr/bin/ld: final link failed: No space left on device"
    full = compiler_of(tmp_path, f"#!/bin/sh\necho '{said}' >&2\necho 'collect2: error: ld returned 1 exit status' >&2\nexit 1\n")
    with pytest.raises(CannotBuild, match=f"failed: {said}"):
        library_path(AVX2, tmp_path / "cache", compiler=full)
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotBuild, match=r"cache .* cannot be written"):
        library_path(AVX2, tmp_path / "file" / "cache", compiler=failing)
    if os.getuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(CannotBuild, match="cannot be written: Permission denied"):
            library_path(AVX2, tmp_path / "locked" / "cache", compiler=failing)
    garbled = compiler_of(tmp_path, "#!/bin/sh\nprintf 'error: \\377\\n' >&2\nexit 1\n")
    with pytest.raises(CannotBuild, match="failed: error: \ufffd"):
        library_path(AVX2, tmp_path / "cache", compiler=garbled)
    monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.1)
    with pytest.raises(CannotBuild, match=r"longer than 0.1 s"):
        library_path(AVX2, tmp_path / "cache", compiler=compiler_of(tmp_path, "#!/bin/sh\nexec sleep 20\n"))


def test_a_compiler_of_another_process_that_is_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiler_of(tmp_path, A_COMPILER)
    monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.1)
    with lock_file(tmp_path / ".lock", 0), pytest.raises(CannotBuild, match=r"another process has kept .* locked for 0\.2 s"):
        library_path(AVX2, tmp_path, compiler=compiler)


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 3_999_999_999)  # in no passwd
    with pytest.raises(CannotBuild, match=r"no home directory.*XDG_CACHE_HOME"):
        cache_directory()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "rantang" / "kernels"


def test_our_sources_compile_wherever_they_can() -> None:
    """The other tests of the step skip where there is no library: that must never be because the sources are broken."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ on PATH: nothing can compile the C++ step")
    try:
        usable = usable_isas(granted(cpu_flags()))
    except CannotBuild as error:
        pytest.skip(f"the C++ step has no form for this CPU: {error}")
    for isa in usable:
        assert library_path(isa, cache_directory()).exists()
