"""`-m cluster` and `-m patient` import only the modules that name the marker: nobody else may give it to a test.

And no test is left out of `make test`.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.markers import ALONE, BESIDE_OTHERS, PATIENT, WITHOUT_RAY, may_be_of

TESTS = Path(__file__).resolve().parents[1]
GIVES = re.compile(r"\bmark\s*\.\s*(cluster|alone|patient)\b|\bmark\s*,\s*[\"'](cluster|alone|patient)|add_marker\(")
HAS_A_CLOCK = re.compile(r"^(import|from) (asyncio|hypothesis|multiprocessing|socket|threading|time)\b", re.MULTILINE)
LIMIT_S = re.compile(r"timeout=([^,)]*)")
LEAST_LIMIT_S = 1000.0  # longer than the whole suite takes


def giving(pattern: str) -> dict[Path, str]:
    """Sources under `pattern` that give a test one of the markers."""
    sources = {path: path.read_text() for path in TESTS.rglob(pattern) if path.name not in (Path(__file__).name, "markers.py")}
    assert sources
    return {path: source for path, source in sources.items() if GIVES.search(source)}


def test_only_modules_of_tests_give_the_markers() -> None:
    assert [path for path in giving("*.py") if not path.name.startswith("test_")] == []


def test_who_gives_a_marker_is_imported() -> None:
    found = giving("test_*.py")
    patient = {path: source for path, source in found.items() if "mark.patient" in source}
    of_ray = {path: source for path, source in found.items() if path not in patient}
    assert {path.parent.name for path in of_ray} == {"cluster", "end_to_end"}
    assert all(may_be_of(part, source) for source in of_ray.values() for part in (ALONE, BESIDE_OTHERS, "cluster", "", WITHOUT_RAY))
    assert all(may_be_of(part, source) for source in patient.values() for part in (PATIENT, "", WITHOUT_RAY))
    nothing = "import pytest\n\ndef test_without_ray() -> None: ...\n"
    assert [part for part in (ALONE, BESIDE_OTHERS, PATIENT, "cluster", "", WITHOUT_RAY) if may_be_of(part, nothing)] == ["", WITHOUT_RAY]


def test_who_is_alone_starts_ray() -> None:
    """With one marker and not the other a test would run in a part of the suite that is not meant for it."""
    for path, source in giving("test_*.py").items():
        assert source.count("mark.alone") <= source.count("mark.cluster"), path
        whole_module = re.search(r"^pytestmark = .*mark\.cluster, pytest\.mark\.alone", source, re.MULTILINE)
        assert bool(whole_module) == (path.parent.name == "end_to_end"), path


def impatience(source: str) -> list[str]:
    """What would have a test fail that stands still for minutes."""
    clocks = [found.group() for found in HAS_A_CLOCK.finditer(source)]
    return clocks + [limit for limit in LIMIT_S.findall(source) if float(limit) < LEAST_LIMIT_S]


def test_who_is_patient_may_stand_still() -> None:
    """Where others compute, it gets next to nothing of the cores."""
    patient = {path: source for path, source in giving("test_*.py").items() if "mark.patient" in source}
    assert patient
    for path, source in patient.items():
        assert re.search(r"^pytestmark = pytest\.mark\.patient$", source, re.MULTILINE) and "mark.cluster" not in source, path
        assert impatience(source) == [], path
    assert impatience("import os\nfrom hypothesis import given\nrun(x, timeout=60)\n") == ["from hypothesis", "60"], "the control"
