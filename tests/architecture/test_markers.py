"""`-m cluster` imports only the modules that name the marker: nobody else may give it to a test."""

from __future__ import annotations

import re
from pathlib import Path

from tests.markers import may_start_ray

TESTS = Path(__file__).resolve().parents[1]
GIVES = re.compile(r"\bmark\s*\.\s*cluster\b|\bmark\s*,\s*[\"']cluster|add_marker\(")


def test_only_modules_of_tests_give_the_marker() -> None:
    helpers = [path for path in TESTS.rglob("*.py") if not path.name.startswith("test_") and path.name != "markers.py"]
    assert helpers
    assert [path for path in helpers if GIVES.search(path.read_text())] == []


def test_who_gives_the_marker_is_imported() -> None:
    giving = {path for path in TESTS.rglob("test_*.py") if path.name != Path(__file__).name and GIVES.search(path.read_text())}
    assert {path.parent.name for path in giving} == {"cluster", "end_to_end"}
    assert all(may_start_ray(path.read_text()) for path in giving)
    assert not may_start_ray("import pytest\n\ndef test_without_ray() -> None: ...\n")
