"""Kernels are disassembled together: what belongs to whom, and nothing may be missing."""

from __future__ import annotations

import struct

import pytest

from bench.kernels.disassembly import INSTRUCTION_BYTES, code_of, divided, listings

NAMES = b"\0.shstrtab\0.text.one\0.data\0.text.two\0"


def elf(contents: dict[bytes, bytes]) -> bytes:
    """An ELF file of these sections, by name, and of what holds their names."""
    body, headers = b"\0" * 64, [bytes(64)]
    for name, content in {b".shstrtab": NAMES, **contents}.items():
        headers.append(struct.pack("<IIQQQQIIQQ", NAMES.index(b"\0" + name + b"\0") + 1, 1, 0, 0, len(body), len(content), 0, 0, 1, 0))
        body += content
    head = b"\x7fELF" + bytes(36) + struct.pack("<Q", len(body)) + bytes(10) + struct.pack("<HHH", 64, len(headers), 1)
    return head + body[64:] + b"".join(headers)


def listing(*instructions: str) -> str:
    lines = (f"        /*{index * INSTRUCTION_BYTES:04x}*/                   {text} ;" for index, text in enumerate(instructions))
    return "\n".join(["\t.headerflags @ 90", *lines, "\t.L_0:"])


def test_code_is_what_the_text_sections_hold() -> None:
    assert code_of(elf({b".text.one": b"a" * 32, b".data": b"d" * 8, b".text.two": b"b" * 16})) == b"a" * 32 + b"b" * 16
    with pytest.raises(ValueError, match="holds no code"):
        code_of(elf({b".data": b"d" * 8}))


def test_each_gets_its_own_instructions() -> None:
    first, second = divided(listing("HGMMA R1", "LDG.E.128 R4", "EXIT"), [16, 32])
    assert "HGMMA" in first and "LDG" not in first
    assert second.splitlines()[0].endswith("LDG.E.128 R4 ;") and second.splitlines()[1].endswith("EXIT ;")


@pytest.mark.parametrize("sizes", [[16, 48], [32, 32], [16, 16]])
def test_an_instruction_that_is_not_listed_is_missed(sizes: list[int]) -> None:
    with pytest.raises(RuntimeError, match="nvdisasm lists"):
        divided(listing("HGMMA R1", "LDG.E.128 R4", "EXIT"), sizes)


def test_of_nothing_there_is_nothing() -> None:
    assert listings([], "sm_90") == []
