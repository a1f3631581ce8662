"""What a launcher launches, without a device: recorded instead of run, and compiled as Triton itself would have compiled it.

So what is checked ahead of time is what a GPU will be given: the launcher's own choice of tile, constants and options, and Triton's
own reading of the arguments (which are divisible by 16, which are 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from kernels.triton.tiles import pretend

WARP_LANES = {"cuda": 32, "hip": 64}


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch as it was asked for."""

    kernel: Any  # JITFunction
    args: tuple[Any, ...]
    options: dict[str, Any]  # keyword arguments and num_warps, num_stages, …

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


def target_of(architecture: str) -> GPUTarget:
    """sm_90, gfx942 → what Triton compiles for."""
    if architecture.startswith("sm_"):
        return GPUTarget("cuda", int(architecture.removeprefix("sm_")), WARP_LANES["cuda"])
    return GPUTarget("hip", architecture, WARP_LANES["hip"])


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Inside, kernels are not run but noted. What they would have written stays as it is."""
    if not issubclass(type(_probe), JITFunction):
        raise RuntimeError("kernels are interpreted in this process (TRITON_INTERPRET=1): nothing can be compiled here")
    noted: list[Launch] = []

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        noted.append(Launch(self, args, options))

    original = JITFunction.run
    JITFunction.run = note
    try:
        yield noted
    finally:
        JITFunction.run = original


def launches_of(call: Callable[[], object], architecture: str) -> list[Launch]:
    """What `call` launches on `architecture`."""
    with pretend(architecture), recording() as noted:
        call()
    return noted


def compile_launch(launch: Launch, architecture: str) -> Any:
    """Triton's compiled kernel (metadata, asm). Raises what the compiler raises."""
    target = target_of(architecture)
    backend = make_backend(target)
    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.args, **launch.options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, dict(launch.options), bound, specialization, options)
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=parsed.__dict__)


@triton.jit  # type: ignore[untyped-decorator]
def _probe() -> None:
    """Tells whether this process compiles or interprets."""
