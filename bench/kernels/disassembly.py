"""Machine code of NVIDIA kernels as text. Of many kernels at once: nvdisasm takes a third of a second to begin, whatever it reads."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

TOOL_TIMEOUT_S = 60.0
INSTRUCTION_BYTES = 16  # from sm_70 on
_ADDRESS = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/")
_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, …


def resource_usage(cubin: bytes) -> str:
    """As cuobjdump says it. Raises RuntimeError when it fails."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _run("cuobjdump", "--dump-resource-usage", file.name)


def listings(cubins: Sequence[bytes], architecture: str) -> list[str]:
    """The instructions of each cubin, all of one architecture (sm_90), a line each. Raises RuntimeError when nvdisasm fails."""
    if not cubins:
        return []
    codes = [code_of(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        listing = _run("nvdisasm", "--binary", architecture.upper().replace("_", ""), file.name)
    return divided(listing, [len(code) for code in codes])


def code_of(cubin: bytes) -> bytes:
    """The `.text.` sections of a 64-bit ELF file, one behind the other. Raises ValueError where there is none."""
    (first,) = struct.unpack_from("<Q", cubin, 40)
    size, count, named = struct.unpack_from("<HHH", cubin, 58)
    sections = [_SECTION.unpack_from(cubin, first + index * size) for index in range(count)]
    names = sections[named][4]
    code = b"".join(cubin[each[4] : each[4] + each[5]] for each in sections if cubin.startswith(b".text.", names + each[0]))
    if not code:
        raise ValueError("the cubin holds no code")
    return code


def divided(listing: str, sizes: Sequence[int]) -> list[str]:
    """One listing of pieces of `sizes` bytes, as a listing of each. Raises RuntimeError unless it has a line for every instruction."""
    ends = list(accumulate(sizes))
    lines: list[list[str]] = [[] for _ in range(len(sizes) + 1)]  # the last: of nobody
    for line in listing.splitlines():
        address = _ADDRESS.match(line)
        if address is not None:
            lines[bisect_right(ends, int(address[1], 16))].append(line)
    if [len(each) * INSTRUCTION_BYTES for each in lines] != [*sizes, 0]:
        raise RuntimeError(f"nvdisasm lists {[len(each) for each in lines[:-1]]} instructions of kernels of {list(sizes)} bytes")
    return ["\n".join(each) for each in lines[:-1]]


def _run(tool: str, *args: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    done = subprocess.run([str(path), *args], capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip()[:200]}")
    return done.stdout
