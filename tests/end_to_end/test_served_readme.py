"""The README's commands and snippets work as they stand there, against a stack on another port."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.stack import Stack

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(sh|bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = re.compile(r"(127\.0\.0\.1|localhost):8000")
STARTERS = ("make ", "rantang serve", "git clone", "cd ", "pip install", "apt", "sudo ", "kubectl ", "rantang chat")


@dataclass(frozen=True, slots=True)
class Snippet:
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """A shell block's commands, continuation lines joined, comments and empty lines left out."""
        joined = re.sub(r"\s*\\\n\s*", " ", self.text)
        return [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]


def snippets(text: str) -> list[Snippet]:
    return [Snippet(language, body) for language, body in BLOCK.findall(text)]


def readme() -> list[Snippet]:
    return snippets((ROOT / "README.md").read_text())


def targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def run(command: list[str], stack: Stack, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    port = stack.url.rsplit(":", 1)[1]
    replaced = [ADDRESS.sub(rf"\1:{port}", part) for part in command]
    return subprocess.run(replaced, capture_output=True, text=True, timeout=120, cwd=folder, env=environment, check=False)


def test_blocks_are_found_and_joined() -> None:
    found = snippets("x\n```bash\n# say\ncurl a \\\n  -d b\n\nmake serve\n```\ny\n```python\nprint(1)\n```\n```json\n{}\n```\n")
    assert found == [Snippet("bash", "# say\ncurl a \\\n  -d b\n\nmake serve\n"), Snippet("python", "print(1)\n")]
    assert found[0].commands == ["curl a -d b", "make serve"]


def test_make_commands_name_targets_that_exist() -> None:
    named = {
        command.split()[1] for block in readme() for command in block.commands if command.startswith("make ") and block.language != "python"
    }
    assert {"serve", "test"} <= named <= targets()


def test_shell_snippets_work(served: Stack, tmp_path: Path) -> None:
    lines = [{"timestamp": i / 4, "messages": [{"role": "user", "content": f"Say {i}."}], "output_tokens": 3} for i in range(4)]
    (tmp_path / "requests-log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))  # what a reader would have
    ran = 0
    for block in readme():
        for command in block.commands if block.language != "python" else []:
            if command.startswith(STARTERS):
                continue  # starts or installs things: the stack under test is one of them already
            done = run(["bash", "-euo", "pipefail", "-c", command], served, tmp_path)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            assert '"error"' not in done.stdout, f"{command}\n{done.stdout}"
            ran += 1
    assert ran, "the README shows how to ask"


def test_python_snippets_work(served: Stack) -> None:
    blocks = [block for block in readme() if block.language == "python"]
    assert blocks, "the README shows how to ask from Python"
    for block in blocks:
        done = run([sys.executable, "-c", ADDRESS.sub(f"127.0.0.1:{served.url.rsplit(':', 1)[1]}", block.text)], served)
        assert done.returncode == 0, f"{block.text}\n{done.stderr}"
        assert done.stdout.strip(), "a snippet prints its answer"
