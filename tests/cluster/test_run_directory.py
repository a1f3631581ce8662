"""Scratch directories: private, gone after use, and those of killed runs are swept."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cluster.run_directory import PARENT_BYTES_MAX, PREFIX, RunDirectory


def test_only_this_user_can_read_it_and_its_token(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path)
    token = run.write_token()
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64
    run.remove()
    run.remove()
    assert not run.path.exists()


def test_one_in_use_is_left_alone_and_one_left_behind_is_swept(tmp_path: Path) -> None:
    used = RunDirectory.create(tmp_path)
    left = RunDirectory.create(tmp_path)
    left.keep()
    foreign = tmp_path / f"{PREFIX}not-ours"  # no lock file: not one of these
    foreign.mkdir()
    new = RunDirectory.create(tmp_path)
    assert used.path.exists()
    assert not left.path.exists()
    assert foreign.exists()
    new.remove()
    used.remove()


def test_a_long_temporary_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert len(os.fsencode(tmp_path)) > PARENT_BYTES_MAX
    run = RunDirectory.create()
    try:
        assert run.path.parent == Path("/tmp")
    finally:
        run.remove()
