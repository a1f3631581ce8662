"""`-m cluster` imports only the modules that name the marker: nobody else may give it to a test. And no test is left out of `make test`."""

from __future__ import annotations

import re
from pathlib import Path

from tests.markers import may_start_ray

TESTS = Path(__file__).resolve().parents[1]
GIVES = re.compile(r"\bmark\s*\.\s*(cluster|alone)\b|\bmark\s*,\s*[\"'](cluster|alone)|add_marker\(")


def giving(pattern: str) -> dict[Path, str]:
    """Sources under `pattern` that give a test one of the markers."""
    sources = {path: path.read_text() for path in TESTS.rglob(pattern) if path.name not in (Path(__file__).name, "markers.py")}
    assert sources
    return {path: source for path, source in sources.items() if GIVES.search(source)}


def test_only_modules_of_tests_give_the_markers() -> None:
    assert [path for path in giving("*.py") if not path.name.startswith("test_")] == []


def test_who_gives_a_marker_is_imported() -> None:
    found = giving("test_*.py")
    assert {path.parent.name for path in found} == {"cluster", "end_to_end"}
    assert all(may_start_ray(source) for source in found.values())
    assert not may_start_ray("import pytest\n\ndef test_without_ray() -> None: ...\n")


def test_who_is_alone_starts_ray() -> None:
    """With one marker and not the other a test would run in a part of the suite that is not meant for it."""
    for path, source in giving("test_*.py").items():
        assert source.count("mark.alone") <= source.count("mark.cluster"), path
        whole_module = re.search(r"^pytestmark = .*mark\.cluster, pytest\.mark\.alone", source, re.MULTILINE)
        assert bool(whole_module) == (path.parent.name == "end_to_end"), path
