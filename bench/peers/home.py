"""Where peers live: a cache folder outside the tree, one folder with a virtual environment for each, and the models they share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from replica.contract import model_files

DEFAULT = Path("~/.cache/rantang/peers")
INSTALL_TIMEOUT_S = 3600.0


class PeerError(Exception):
    """A peer could not be installed or started; the message says why."""


@dataclass(frozen=True, slots=True)
class Home:
    """`model`: what is compared, as `rantang serve --model` names it; a GGUF."""

    root: Path
    model: str = model_files.EMBEDDED_MODEL

    def folder(self, peer: str) -> Path:
        return self.root / peer

    def executable(self, peer: str, name: str) -> Path:
        """A program of the peer's own environment."""
        return self.folder(peer) / "env" / "bin" / name

    def purelib(self, peer: str) -> Path:
        """Where the environment keeps its packages."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder(peer) / "env" / "lib" / version / "site-packages"

    @property
    def checkpoint(self) -> Path:
        return self.root / "models" / f"{model_files.EMBEDDED_MODEL}-bf16"

    @property
    def gguf_bf16(self) -> Path:
        return self.root / "models" / f"{model_files.EMBEDDED_MODEL}-bf16.gguf"

    @property
    def gguf(self) -> Path:
        """The file as it is. Raises ModelError."""
        return model_files.resolve(self.model).gguf

    def make_models(self) -> None:
        """Both bfloat16 forms, where they are not there yet. Whole or not at all."""
        from bench.peers.checkpoint import make_checkpoint, make_gguf  # torch: two seconds that a comparison need not wait for

        files = model_files.resolve(self.model)
        if not self.checkpoint.is_dir():
            partial = self.checkpoint.with_name(self.checkpoint.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            make_checkpoint(files, partial)
            partial.rename(self.checkpoint)
        if not self.gguf_bf16.is_file():
            unfinished = self.gguf_bf16.with_name(self.gguf_bf16.name + ".partial")
            make_gguf(files.gguf, unfinished)
            unfinished.rename(self.gguf_bf16)

    def make_environment(self, peer: str) -> None:
        """A virtual environment with this Python, if the peer has none."""
        if not self.executable(peer, "python").exists():
            self.call([sys.executable, "-m", "venv", str(self.folder(peer) / "env")])

    def pip_install(self, peer: str, arguments: Sequence[str]) -> None:
        pip = [str(self.executable(peer, "python")), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        self.call([*pip, *arguments])

    def call(self, command: Sequence[str], *, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
        """Run to its end, its output passed through. Raises PeerError."""
        try:
            code = subprocess.run(
                command, cwd=folder, env={**os.environ, **(environment or {})}, timeout=INSTALL_TIMEOUT_S, check=False
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerError(f"{command[0]}: {error}") from error
        if code:
            raise PeerError(f"exit code {code}: {' '.join(command)}")

    def version_of(self, peer: str, package: str) -> str:
        """The version of a package in the peer's environment, by its metadata folder; "" when it is not there."""
        stem = package.replace("-", "_")
        found = sorted(self.purelib(peer).glob(f"{stem}-*.dist-info"))
        return found[-1].name.removeprefix(f"{stem}-").removesuffix(".dist-info") if found else ""

    def public(self, text: str) -> str:
        """`text` without the folders of this machine."""
        for path, name in ((self.root, "PEERS"), (Path(sys.prefix), "VENV"), (Path.home(), "HOME")):
            text = text.replace(str(path), name)
        return text
