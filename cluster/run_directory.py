"""The scratch directory of one `rantang serve`: Ray's sessions, HAProxy's files, the token. Short, because sockets lie in it."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "rantang-"
PARENT_BYTES_MAX = 15  # HAProxy takes 97 bytes for the path of its socket; the names below this leave no more
_LOCK = "lock"
_TOKEN_BYTES = 32
_REMOVE_S = 3.0


class RunDirectory:
    """Exists from `create` to `remove`. Locked while its process lives, so that leftovers of killed runs can be told and removed."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, parent: Path | None = None) -> RunDirectory:
        """A new one, readable by this user alone. Removes those of this user that no process holds any more."""
        parent = parent or _short_parent()
        _sweep(parent)
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(path, lock)

    def write_token(self) -> Path:
        """Ray's token for this cluster: a file that only this user can read, so that it is in nobody's environment."""
        path = self.path / "ray-token"
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(_TOKEN_BYTES))
        return path

    def remove(self) -> None:
        """Idempotent. What a thread of a start that is being stopped still writes goes too; the next sweep takes the rest."""
        until_s = time.monotonic() + _REMOVE_S
        shutil.rmtree(self.path, ignore_errors=True)
        while self.path.exists() and time.monotonic() < until_s:
            time.sleep(0.02)
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def keep(self) -> None:
        """Leave the files for whoever looks for the cause of a failure; the next start removes them."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _short_parent() -> Path:
    """The usual place for temporary files, unless its name is so long that sockets below it could not be bound."""
    usual = Path(tempfile.gettempdir())
    return usual if len(os.fsencode(usual)) <= PARENT_BYTES_MAX else Path("/tmp")


def _sweep(parent: Path) -> None:
    for path in sorted(parent.glob(PREFIX + "*")):
        try:
            if path.stat().st_uid != os.getuid() or path.is_symlink():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its process lives
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
