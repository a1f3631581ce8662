"""The C++ step as a shared library: compiled with g++ when it is first needed, kept in the user's cache by sources and CPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kernels.cpu.lock import lock_file

SOURCES = ("step.cpp", "amx.h", "attention.h", "avx2.h", "avx512.h", "matrix.h", "sampling.h", "simd.h", "team.h")
COMPILE_TIMEOUT_S = 300.0  # ten seconds of work, on a machine that has other things to do too
ISA_VARIABLE = "RANTANG_CPU_ISA"  # amx, avx512 or avx2 instead of the best that this CPU has
CPU_INFO = Path("/proc/cpuinfo")
_ASK_FOR_TILES = (158, 0x1023, 18)  # arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA) of x86-64


@dataclass(frozen=True, slots=True)
class Isa:
    """A set of instructions that the sources know: what the CPU must have (as the kernel calls it), what the compiler is told."""

    name: str
    title: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mavx512vnni", "-mavx512bf16")
_NEEDS_AVX512 = frozenset({"avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512_vnni", "avx512_bf16", "avx2", "fma", "f16c"})
_TILES = frozenset({"amx_tile", "amx_bf16"})
_BYTES = frozenset({"avx512vbmi"})  # every CPU with AMX has it too
ISAS = (  # the best first
    Isa("amx", "AVX-512 BF16 and AMX", _NEEDS_AVX512 | _TILES | _BYTES, ("-mamx-tile", "-mamx-bf16", "-mavx512vbmi", *_AVX512, *_AVX2)),
    Isa("avx512", "AVX-512 BF16", _NEEDS_AVX512, _AVX512 + _AVX2),
    Isa("avx2", "AVX2", frozenset({"avx2", "fma", "f16c"}), _AVX2),
)


class CannotBuild(Exception):
    """Why there is no library, one line for the user."""


def usable_isas(cpu_flags: frozenset[str], wanted: str = "") -> tuple[Isa, ...]:
    """The sets that this CPU has, the best first; `wanted` names one. Raises CannotBuild when there is none."""
    names = [isa.name for isa in ISAS]
    if wanted and wanted not in names:
        raise CannotBuild(f"{ISA_VARIABLE} is {wanted[:40]!r}, which is none of {', '.join(names)}")
    usable = tuple(isa for isa in ISAS if isa.needs <= cpu_flags and wanted in ("", isa.name))
    if not usable:
        raise CannotBuild(f"this CPU has no {wanted}" if wanted else "this CPU has neither AVX-512 BF16 nor AVX2")
    return usable


def best_library(cache: Path, wanted: str = "") -> tuple[Isa, Path, str]:
    """Of the best set of instructions that a library is to be had for, and why a better one that the CPU has is not used ('': it is).

    A kernel may refuse AMX, a compiler not know it. Raises CannotBuild.
    """
    has = cpu_flags()
    usable = granted(has)
    refused = "Linux refuses AMX to this process" if usable != has and wanted in ("", "amx") else ""
    if refused and wanted:
        raise CannotBuild(refused)
    reason = ""
    for isa in usable_isas(usable, wanted):
        try:
            return isa, library_path(isa, cache), refused or reason
        except CannotBuild as error:
            reason = reason or str(error)
    raise CannotBuild(reason)


def granted(flags: frozenset[str]) -> frozenset[str]:
    """`flags` without AMX where the kernel does not let this process use it: Linux wants to be asked once."""
    if flags >= _TILES and ctypes.CDLL(None).syscall(*_ASK_FOR_TILES):
        return flags - _TILES
    return flags


def cpu_flags(path: Path = CPU_INFO) -> frozenset[str]:
    """What the kernel says this CPU can do; nothing where it does not say."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def cache_directory() -> Path:
    """Raises CannotBuild for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rantang" / "kernels"
    except RuntimeError as error:
        raise CannotBuild("there is no home directory for the library (XDG_CACHE_HOME names a place for it)") from error


def library_path(isa: Isa, cache: Path, *, extra: tuple[str, ...] = (), compiler: str = "g++") -> Path:
    """The library for `isa`, compiled if the cache has none of these very sources and flags. Raises CannotBuild.

    Safe for several processes at once: one compiles, the others wait for it.
    """
    # No contraction: a sum must be rounded alike in every tile that the compiler unrolls.
    options = ("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC", "-pthread", *isa.flags, *extra)
    sources = Path(__file__).parent
    digest = hashlib.sha256("\n".join(options).encode())
    for name in SOURCES:
        digest.update((sources / name).read_bytes())
    target = cache / f"step-{isa.name}-{digest.hexdigest()[:20]}.so"
    if target.is_file():
        return target
    program = shutil.which(compiler)
    if program is None:
        raise CannotBuild(f"no {compiler} on PATH (install it once: the step is compiled on first use)")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with lock_file(cache / ".lock", 2 * COMPILE_TIMEOUT_S):
            if not target.is_file():
                _compile([program, *options, str(sources / SOURCES[0])], target)
    except OSError as error:
        raise CannotBuild(f"the cache {cache} cannot be written: {error.strerror or error}") from error
    return target


def _compile(command: list[str], target: Path) -> None:
    """Into a file beside `target`, which then takes its name: nobody ever loads half a library."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        try:
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, timeout=COMPILE_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise CannotBuild(f"{command[0]} took longer than {COMPILE_TIMEOUT_S:g} s") from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").splitlines()
            # "failed" is the linker's word, of a full disk for example: the error after it says only that there was one.
            complaint = next((line for line in said if "error" in line or "failed" in line), "no message")
            raise CannotBuild(f"{command[0]} failed: {complaint.strip()}")
        os.replace(made, target)
