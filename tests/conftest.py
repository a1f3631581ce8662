"""Tests of what meets sockets run on both event loops: Serve's processes run uvloop, whose transports are not asyncio's.

Where `-m` chooses tests of Ray only, or patient ones, a few out of thousands, modules that never name that marker are not imported.

Triton kernels are interpreted in this process, which must be said before triton is imported; `make gpu` says 0.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import hypothesis
import pytest
import uvloop

from tests.markers import may_be_of

os.environ.setdefault("TRITON_INTERPRET", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of what a shell starts in the background; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("untimed")
ON_BOTH_LOOPS = ("test_link_handshake", "test_link_stream", "test_replica_server", "test_link_client")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if item.path.stem in ON_BOTH_LOOPS:
        loops["uvloop"] = uvloop.new_event_loop
    return loops


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.match("test_*.py") and not may_be_of(config.option.markexpr, collection_path.read_text()):
        return True
    return None


def pytest_collection_finish() -> None:
    """What was imported stays until the end: no search for garbage need look at those hundreds of thousands of objects."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries in C++ complain of what they still hold


class _WithoutTriton(pytest.Module):
    """A module of tests of Triton kernels where there is no triton."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip("triton is not installed (the dev extra brings it)", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if module_path.name.startswith("test_triton_") and importlib.util.find_spec("triton") is None:
        module: pytest.Module = _WithoutTriton.from_parent(parent, path=module_path)
        return module
    return None
