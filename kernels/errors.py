"""What the kernels refuse."""

from __future__ import annotations


class KernelError(Exception):
    """The kernels that were asked for cannot run here. One line, for the user: what cannot be, and what would work."""
