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


def test_who_serves_a_model_is_alone_and_starts_ray() -> None:
    """Whole modules: a test with one marker and not the other would run in a part of the suite that is not meant for it."""
    for path, source in giving("test_*.py").items():
        marks = re.search(r"^pytestmark = (.*)$", source, re.MULTILINE)
        served = path.parent.name == "end_to_end"
        assert ("mark.alone" in source) == served, path
        assert not served or (marks and "mark.cluster" in marks[1] and "mark.alone" in marks[1]), path
